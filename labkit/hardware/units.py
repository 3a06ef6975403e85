"""Numbers with units, as people write them: decimal for rates, binary for memory."""

import math
import re

_DECIMAL = ("", "k", "M", "G", "T", "P")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def rate(value: float, unit: str) -> str:
    """Return three significant digits with a decimal prefix (G = 1e9).

    >>> rate(419.2e9, "FLOP/s"), rate(0.5, "B/s"), rate(1978.9e12, "FLOP/s")
    ('419 GFLOP/s', '0.5 B/s', '1.98 PFLOP/s')
    """
    step = 0
    while abs(value) >= 999.5 and step < len(_DECIMAL) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.3g} {_DECIMAL[step]}{unit}"


def memory(n_bytes: float) -> str:
    """Return three significant digits with a binary prefix (GiB = 2**30 bytes).

    >>> memory(24 * 2**30), memory(70272)
    ('24 GiB', '68.6 KiB')
    """
    step = 0
    while abs(n_bytes) >= 999.5 and step < len(_BINARY) - 1:
        n_bytes, step = n_bytes / 1024, step + 1
    return f"{n_bytes:.3g} {_BINARY[step]}"


def from_memory(text: str) -> int:
    """Return the bytes that a person means; without a unit, they are bytes.

    >>> from_memory("2GiB"), from_memory("1.5 kib"), from_memory("70272")
    (2147483648, 1536, 70272)

    Raises:
        ValueError: it is no size, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    units = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)}
    number, unit = match.groups() if match else ("0", "")
    n_bytes = math.floor(float(number) * units.get(unit.lower() or "b", 0))
    if n_bytes < 1:
        raise ValueError(
            f"a size must be a number above 0 with a unit of {', '.join(_BINARY)}; got "
            f"{text!r}. Write 2GiB or 500MiB, for example."
        )
    return n_bytes
