"""The checks that configs share; each message names the rule, the value, the fix.

Each takes values by name: fields of a config (`named`), keys of a file, or arguments.
A bool is no number here, and neither NaN nor infinity is finite.
"""

import sys
from collections.abc import Mapping, Sequence


def named(owner: object, *names: str) -> dict[str, object]:
    """Return the named fields of `owner`, ready to be checked."""
    return {name: getattr(owner, name) for name in names}


def require_whole(values: Mapping[str, object], *, at_least: int = 1) -> None:
    """Raise ValueError unless every value is an integer of at least `at_least`."""
    for name, value in values.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < at_least:
            raise ValueError(
                f"{name} must be a whole number of at least {at_least}; got {value!r}. "
                f"Set {name} to {at_least} or more."
            )


def require_above(values: Mapping[str, object], bound: float) -> None:
    """Raise ValueError unless every value is a finite number above `bound`."""
    for name, value in values.items():
        if not is_finite(value) or value <= bound:
            raise ValueError(
                f"{name} must be above {bound} and finite; got {value!r}. "
                f"Set {name} to a number above {bound}."
            )


def require_at_least(values: Mapping[str, object], bound: float) -> None:
    """Raise ValueError unless every value is a finite number of at least `bound`."""
    for name, value in values.items():
        if not is_finite(value) or value < bound:
            raise ValueError(
                f"{name} must be at least {bound} and finite; got {value!r}. "
                f"Set {name} to {bound} or more."
            )


def require_fraction(values: Mapping[str, object]) -> None:
    """Raise ValueError unless every value is a number in [0, 1)."""
    for name, value in values.items():
        if not is_finite(value) or not 0 <= value < 1:
            raise ValueError(
                f"{name} must be at least 0 and below 1; got {value!r}. "
                f"Set {name} to a number in [0, 1)."
            )


def require_flag(values: Mapping[str, object]) -> None:
    """Raise ValueError unless every value is a bool."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(
                f"{name} must be True or False; got {value!r}. "
                f"Set {name} to one of these."
            )


def require_choice(values: Mapping[str, object], choices: Sequence[str]) -> None:
    """Raise ValueError unless every value is one of `choices`."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in choices:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, choices))}; got "
                f"{value!r}. Set {name}={choices[0]!r} or another of these."
            )


def require_name(values: Mapping[str, object]) -> None:
    """Raise ValueError unless every value is a text that is not empty."""
    for name, value in values.items():
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"{name} must be a name; got {value!r}. Set {name} to a text that is "
                "not empty."
            )


def require_instance(
    values: Mapping[str, object], *kinds: type, optional: bool = False
) -> None:
    """Raise ValueError unless every value is of one of `kinds`, or None if allowed."""
    names = [kind.__name__ for kind in kinds] + ["None"] * optional
    for name, value in values.items():
        is_absent = optional and value is None
        if not is_absent and not isinstance(value, kinds):
            raise ValueError(
                f"{name} must be of type {' or '.join(names)}; got {value!r}. "
                f"Build it first: {name}={names[0]}(...)."
            )


def is_finite(value: object) -> bool:
    """Whether `value` is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # False for NaN, and exact for long integers.
    return abs(value) <= sys.float_info.max
