"""How numbers are written for readers: no exponent where none is needed."""


def spell(value: float, *, digits: int = 3) -> str:
    """Return a number with thousands separated; fractions to `digits` significant.

    Whole digits are never rounded away.

    >>> spell(70272), spell(1234.56), spell(0.6710264), spell(37.55, digits=4)
    ('70,272', '1,235', '0.671', '37.55')
    """
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"


def spell_ratio(ratio: float) -> str:
    """Return how many times larger something is.

    >>> spell_ratio(6.95), spell_ratio(71.1), spell_ratio(0.31)
    ('7.0 times', '71 times', '0.31 times')
    """
    if ratio >= 10:
        return f"{ratio:,.0f} times"
    return f"{ratio:.1f} times" if ratio >= 1 else f"{ratio:.2g} times"
