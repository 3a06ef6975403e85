"""Counting the storages that operators allocate, exactly and on any device.

A resident set size or a profiler's peak differs from run to run. What operators ask
for does not: the same code asks for the same bytes in the same order, also on "meta",
where nothing is really allocated.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Event(NamedTuple):
    """One storage that was made, or freed again."""

    number: int
    """Of the storage, counted from 1 in the order in which they were made."""

    n_bytes: int
    """Negative when it is freed."""


class AllocationCount(TorchDispatchMode):
    """Records every storage that an operator returns while this is active.

    Views and writes in place return storages that were there before, and do not
    count. What a kernel uses inside itself is not seen.

    >>> with AllocationCount() as count:
    ...     rows = torch.zeros(4, 2)
    ...     rows[0] = 1
    ...     rows = torch.cat([rows, rows])
    >>> count.n_allocations, count.total_bytes, count.live_bytes, count.peak_bytes
    (2, 96, 64, 96)
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.n_allocations = 0
        self.total_bytes = 0
        """Bytes of all storages made, freed ones included."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __repr__(self) -> str:
        return (
            f"AllocationCount(n_allocations={self.n_allocations}, "
            f"total_bytes={self.total_bytes}, live_bytes={self.live_bytes}, "
            f"peak_bytes={self.peak_bytes})"
        )

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage made, in order."""
        return [event.n_bytes for event in self.events if event.n_bytes > 0]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401, operators return anything
        kwargs = kwargs or {}
        before = {_address(storage) for storage in _storages((args, kwargs))}
        out = func(*args, **kwargs)
        for storage in _storages(out):
            if _address(storage) not in before | self._known:
                self._note(storage)
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() == 0:
            return
        address, n_bytes = _address(storage), storage.nbytes()
        self._known.add(address)
        self.n_allocations += 1
        self.total_bytes += n_bytes
        self.live_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.events.append(Event(self.n_allocations, n_bytes))
        weakref.finalize(
            storage, self._forget, address, self.n_allocations, n_bytes
        ).atexit = False

    def _forget(self, address: int, number: int, n_bytes: int) -> None:
        # Also after the mode has ended: what dies then is no longer live.
        self._known.discard(address)
        self.events.append(Event(number, -n_bytes))
        self.live_bytes -= n_bytes


def _storages(tree: object) -> list[torch.UntypedStorage]:
    leaves = tree_leaves(tree)
    return [x.untyped_storage() for x in leaves if isinstance(x, torch.Tensor)]


def _address(storage: torch.UntypedStorage) -> int:
    """Return what tells storages apart; on "meta" the data has no address."""
    return storage._cdata
