"""Comparing a learner's value with the right one, and saying how they differ."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

Plain = Any
"""Numbers, strings, lists and dicts: what tensors and arrays turn into."""

LONG = 10**15
"""Whole numbers from here on are shortened, not written out."""


def plain(value: object) -> Plain:
    """Return tensors, arrays and tuples as nested lists, scalars as numbers.

    >>> plain((1, [2, 3]))
    [1, [2, 3]]
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def is_number(value: object) -> bool:
    """Return whether a plain value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def same(left: Plain, right: Plain, *, tolerance: float) -> bool:
    """Return whether two plain values are equal, fractions up to a tolerance.

    NaN equals NaN here, so that a known wrong turn to NaN is recognised.
    """
    if is_number(left) and is_number(right):
        return _same_number(left, right, tolerance)
    if isinstance(left, list) and isinstance(right, list):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(
            same(a, b, tolerance=tolerance) for a, b in pairs
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            same(left[key], right[key], tolerance=tolerance) for key in left
        )
    if isinstance(left, str) and isinstance(right, str):
        return left.strip().lower() == right.strip().lower()
    return type(left) is type(right) and bool(left == right)


def _same_number(left: float, right: float, tolerance: float) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


def brief(value: Plain) -> str:
    """Return a value in one short line.

    >>> brief(187107328), brief(0.1 + 0.2)
    ('187,107,328', '0.3')
    """
    if is_number(value) and isinstance(value, int) and abs(value) < LONG:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if callable(value):
        return f"the function {getattr(value, '__name__', 'itself')}"
    short = reprlib.Repr()
    short.maxlist = short.maxtuple = 6
    short.maxstring = short.maxother = short.maxlong = 60
    return " ".join(short.repr(value).split())


def shape(value: Plain) -> tuple[int, ...]:
    """Return the lengths of a nested list; () for anything else.

    >>> shape([[1, 2, 3], [4, 5, 6]])
    (2, 3)
    """
    if not isinstance(value, list) or not value:
        return (0,) if isinstance(value, list) else ()
    return (len(value), *shape(value[0]))


def difference(got: Plain, expected: Plain, *, tolerance: float) -> str:
    """Return "you gave …, expected …", about the first place where they differ."""
    if got is None:
        return f"you gave None, expected {brief(expected)}: does it return its result?"
    if shape(got) != shape(expected):
        return f"you gave {_form(got)}, expected {_form(expected)}"
    if isinstance(got, list) and isinstance(expected, list):
        place, left, right = _first(got, expected, tolerance)
        return f"you gave {brief(left)} at {place}, expected {brief(right)}"
    kinds = {type(got), type(expected)}
    if len(kinds) == 2 and not (is_number(got) and is_number(expected)):
        name, other = type(got).__name__, type(expected).__name__
        return (
            f"you gave {brief(got)} of type {name}, "
            f"expected {brief(expected)} of type {other}"
        )
    note = ", not a number" if isinstance(got, float) and math.isnan(got) else ""
    return f"you gave {brief(got)}{note}, expected {brief(expected)}"


def _form(value: Plain) -> str:
    """Return the shape of a list, or the value itself."""
    return f"shape {shape(value)}" if isinstance(value, list) else brief(value)


def _first(
    got: list[Any], expected: list[Any], tolerance: float
) -> tuple[list[int], Plain, Plain]:
    """Return the index of the first difference and both values there."""
    for index, (left, right) in enumerate(zip(got, expected, strict=False)):
        if same(left, right, tolerance=tolerance):
            continue
        if isinstance(left, list) and isinstance(right, list):
            place, left, right = _first(left, right, tolerance)
            return [index, *place], left, right
        return [index], left, right
    return [], got, expected
