"""Bytes and messages of everything that a rank sends, by collective and axis.

    with count_communication() as counted:
        model.loss(tokens, targets).total.backward()
    print(counted)

Counted is what `torch.distributed` is asked for: collectives, sends and receives, those
of DTensor, DDP, FSDP2 and pipelines among them. What a rank sends for it is worked out
as `forms` has it, and equals `cost`; a backend may do otherwise (gloo does a
reduce-scatter by an all-reduce). PyTorch's `CommDebugMode` has neither bytes nor sends.

A count belongs to the thread that opened it, and to backward passes that start there.
Work that is handed to another thread is counted if it goes as `counted(work)`. What a
callback of a future sends is not, as that runs where the backend likes (PyTorch's
PowerSGD has such callbacks).
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from labkit.hardware.units import memory
from labkit.parallel.communication.cluster import Link
from labkit.parallel.communication.collective_ops import Call, call_of

NAMESPACES = ("c10d", "_c10d_functional")


@dataclass(frozen=True, slots=True)
class Traffic:
    """All calls of one collective along one axis."""

    collective: str
    """One of `forms.COLLECTIVES`, or receive, broadcast, reduce, gather, scatter,
    barrier."""

    axis: str
    """As the mesh calls it; `world` is everyone."""

    n_ranks: int
    n_calls: int = 0

    n_bytes: float = 0
    """Given to the calls: a rank's buffer in all-reduce and all-to-all, the result in
    all-gather, the input in reduce-scatter."""

    n_messages: float = 0
    """That this rank sent, one after another."""

    sent_bytes: float = 0
    """That this rank sent."""

    def plus(self, call: Call) -> "Traffic":
        """Return this with another call in it."""
        return Traffic(
            self.collective,
            self.axis,
            self.n_ranks,
            self.n_calls + 1,
            self.n_bytes + call.n_bytes,
            self.n_messages + call.n_messages,
            self.sent_bytes + call.sent_bytes,
        )


class Counted:
    """What one rank sent while it was counted.

    Args:
        axes: names for groups, beside those that a mesh has given.
    """

    def __init__(self, axes: Mapping[str, dist.ProcessGroup] | None = None) -> None:
        self._axes = {group.group_name: name for name, group in (axes or {}).items()}
        self._traffic: dict[tuple[str, str, int], Traffic] = {}
        self._lock = threading.Lock()

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """A row for each collective and axis, in alphabetical order."""
        with self._lock:
            return tuple(self._traffic[key] for key in sorted(self._traffic))

    def sum(
        self, what: str, *, collective: str | None = None, axis: str | None = None
    ) -> float:
        """Return the sum of a column.

        Args:
            what: `n_calls`, `n_bytes`, `n_messages` or `sent_bytes`.
            collective: only this one.
            axis: only this one.
        """
        return sum(
            getattr(row, what)
            for row in self.traffic
            if collective in (None, row.collective) and axis in (None, row.axis)
        )

    @property
    def sent_bytes(self) -> float:
        """All that this rank sent."""
        return self.sum("sent_bytes")

    @property
    def n_messages(self) -> float:
        """All messages that this rank sent."""
        return self.sum("n_messages")

    def seconds(self, link: Link | Mapping[str, Link]) -> float:
        """Return how long that takes, modelled, if nothing else is done meanwhile.

        Args:
            link: what joins any two ranks, or a link for each axis.
        """
        return sum(
            (link if isinstance(link, Link) else link[row.axis]).seconds(
                row.sent_bytes, n_messages=row.n_messages
            )
            for row in self.traffic
        )

    @contextmanager
    def here(self) -> Iterator[None]:
        """Count what this thread does, too."""
        with _Counting(self):
            yield

    def add(self, call: Call) -> None:
        """Count one call."""
        key = (call.collective, call.axis, call.n_ranks)
        with self._lock:
            self._traffic[key] = self._traffic.get(key, Traffic(*key)).plus(call)

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        """Count what an operator of PyTorch is about to do."""
        given = zip(func._schema.arguments, args, strict=False)
        arguments = {argument.name: value for argument, value in given}
        call = call_of(func.name(), arguments | dict(kwargs), self._axes)
        if call is not None:
            self.add(call)

    def __repr__(self) -> str:
        heads = ("collective", "axis", "ranks", "calls", "given", "messages", "sent")
        rows = [
            (
                row.collective,
                row.axis,
                str(row.n_ranks),
                str(row.n_calls),
                memory(row.n_bytes),
                f"{row.n_messages:g}",
                memory(row.sent_bytes),
            )
            for row in self.traffic
        ]
        total = ("all", "", "", "", "", f"{self.n_messages:g}", memory(self.sent_bytes))
        return _table([heads, *rows, total])


@contextmanager
def count_communication(
    axes: Mapping[str, dist.ProcessGroup] | None = None,
) -> Iterator[Counted]:
    """Count what this rank sends inside the context.

    Args:
        axes: names for groups, beside those that a mesh has given.
    """
    found = Counted(axes)
    with found.here():
        yield found


def counted(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work` for another thread, counted as if this one did it."""
    counts = [
        mode.found
        for mode in _get_current_dispatch_mode_stack()
        if isinstance(mode, _Counting)
    ]

    @wraps(work)
    def elsewhere(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, what work returns
        if not counts:
            return work(*args, **kwargs)
        with counts[-1].here():
            return work(*args, **kwargs)

    return elsewhere


class _Counting(TorchDispatchMode):
    """Sees the operators of a thread, below autograd."""

    def __init__(self, found: Counted) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            # Not yet: what it does to local tensors comes by next.
            return NotImplemented
        if isinstance(func, torch._ops.OpOverload) and func.namespace in NAMESPACES:
            self.found.note(func, args, kwargs)
        return func(*args, **kwargs)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        words = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        numbers = [c.rjust(w) for c, w in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join([*words, *numbers]).rstrip())
    return "\n".join(lines)
