"""The checks that configs share; each message names the rule, the value, the fix."""

from collections.abc import Sequence


def require_positive(owner: object, names: Sequence[str]) -> None:
    """Raise ValueError unless every named field of `owner` is an integer >= 1."""
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{name} must be a whole number of at least 1; got {value!r}. "
                f"Set {name} to 1 or more."
            )


def require_fraction(owner: object, names: Sequence[str]) -> None:
    """Raise ValueError unless every named field of `owner` lies in [0, 1)."""
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < 1:
            raise ValueError(
                f"{name} must be at least 0 and below 1; got {value!r}. "
                f"Set {name} to a value in [0, 1)."
            )


def require_choice(owner: object, name: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless the named field of `owner` is one of `choices`."""
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}. "
            f"Set {name}={choices[0]!r} or another of these."
        )
