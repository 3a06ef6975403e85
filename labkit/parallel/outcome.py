"""What a rank hands back to the process that launched it, through an open file.

The file has no name, so that nothing is left on disk whoever is killed. It holds one
line of JSON and then, where the rank returned, the result. It is complete or absent:
a rank that dies while it writes has handed back nothing.
"""

import json
import os
from dataclasses import asdict, dataclass

CHUNK = 1 << 24
"""Bytes that are read or written at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the work of a rank ended."""

    kind: str
    """"returned", or the kind of a failure."""

    what: str = "returned"
    """What the rank did, for the reader."""

    trace: str = ""
    """Where it failed."""

    seconds: float = float("inf")
    """When it failed, on the clock of this machine."""

    n_bytes: int = 0
    """Bytes of the result that follow."""


def write_outcome(file: int, outcome: Outcome, result: bytes = b"") -> None:
    """Write an outcome, and the result it announces, to an open file."""
    for part in (json.dumps(asdict(outcome)).encode() + b"\n", result):
        view = memoryview(part)
        while view:
            view = view[os.write(file, view[:CHUNK]) :]


def read_outcome(file: int) -> Outcome | None:
    """Return the outcome in a file, or None while it is not complete."""
    size = os.fstat(file).st_size
    head = _head(file)
    if not head.endswith(b"\n"):
        return None
    outcome = Outcome(**json.loads(head))
    return outcome if size == len(head) + outcome.n_bytes else None


def read_result(file: int) -> bytes:
    """Return the result that follows a complete outcome."""
    start = len(_head(file))
    return read_bytes(file, start, os.fstat(file).st_size - start)


def read_bytes(file: int, start: int, n_bytes: int) -> bytes:
    """Return a part of an open file, without moving where others write in it."""
    parts = []
    while n_bytes > 0 and (part := os.pread(file, min(n_bytes, CHUNK), start)):
        parts.append(part)
        start, n_bytes = start + len(part), n_bytes - len(part)
    return b"".join(parts)


def _head(file: int) -> bytes:
    """Return the first line of a file, as far as it is written."""
    head = b""
    while b"\n" not in head and (part := os.pread(file, 1 << 16, len(head))):
        head += part
    line, end, _ = head.partition(b"\n")
    return line + end
