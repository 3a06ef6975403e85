"""How numbers are written for readers: no exponent where none is needed."""

from collections.abc import Iterable


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


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers with runs of them shortened.

    >>> ranges([0, 1, 2, 4, 7, 8])
    '0-2, 4, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
