"""Counting the storages that operators allocate, exactly and on any device.

A resident set size or a profiler's peak differs from run to run. What operators ask
for does not: the same code asks for the same bytes in the same order, also on "meta",
where nothing is really allocated.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Event(NamedTuple):
    """One storage that was made, or freed again."""

    number: int
    """Of the storage, counted from 1 in the order in which they were made."""

    n_bytes: int
    """Negative when it is freed."""


class AllocationCount(TorchDispatchMode):
    """Records every storage that an operator returns while this is active.

    Views and writes in place return storages that were there before, and do not
    count; nor do tensors of values given in Python, unless a subclass says so. What a
    kernel uses inside itself is not seen.

    >>> with AllocationCount() as count:
    ...     rows = torch.zeros(4, 2)
    ...     rows[0] = 1
    ...     rows = torch.cat([rows, rows])
    >>> count.n_allocations, count.total_bytes, count.live_bytes, count.peak_bytes
    (2, 96, 64, 96)
    """

    counts_given = False
    """Whether tensors of values given in Python count too: `torch.tensor` makes their
    storages unseen, before it calls its only operator."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.n_allocations = 0
        self.total_bytes = 0
        """Bytes of all storages made, freed ones included."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {}
        self._ends: dict[int, weakref.finalize] = {}

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
        inputs = _tensors((*args, *kwargs.values()))
        before = {_address(tensor.untyped_storage()) for tensor in inputs}
        n_before = self.n_allocations
        out = func(*args, **kwargs)
        outputs = _tensors(out if isinstance(out, tuple | list) else (out,))
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if _address(storage) not in before and _address(storage) not in self._known:
                self._note(storage)
        if self.counts_given and func is torch.ops.aten.lift_fresh.default:
            self.adopt(inputs[0])
        self._after(func, inputs, outputs, n_before)
        return out

    def _after(
        self,
        func: Callable[..., Any],
        inputs: Sequence[Shaped[Tensor, "..."]],
        outputs: Sequence[Shaped[Tensor, "..."]],
        n_before: int,
    ) -> None:
        """Be told of an operator that has run; for those that want to know more.

        Storages that it made have numbers above `n_before`.
        """

    def number_of(self, tensor: Shaped[Tensor, "..."]) -> int | None:
        """Return the number of the storage that a tensor views; None if not counted.

        A sparse one views that of its values.

        >>> with AllocationCount() as count:
        ...     rows = torch.zeros(4, 2)
        >>> count.number_of(rows[1]), count.number_of(torch.zeros(1))
        (1, None)
        """
        return next(map(self._number, reversed(_with_storages(tensor))), None)

    def adopt(self, tensor: Shaped[Tensor, "..."]) -> int:
        """Count a storage that was there before, from now on; return its number.

        The number is 0 where there is no byte to count.
        """
        for part in _with_storages(tensor):
            if self._number(part) is None:
                self._note(part.untyped_storage())
        return self.number_of(tensor) or 0

    def _number(self, tensor: Shaped[Tensor, "..."]) -> int | None:
        return self._known.get(_address(tensor.untyped_storage()))

    def close(self) -> None:
        """Stop counting the ends of storages, and let go of what was counted.

        Until then this object lives as long as the longest lived of them.
        """
        for end in self._ends.values():
            end.detach()
        self._ends.clear()
        self._known.clear()

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() == 0:
            return
        address, n_bytes = _address(storage), storage.nbytes()
        self.n_allocations += 1
        self._known[address] = self.n_allocations
        self.total_bytes += n_bytes
        self.live_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.events.append(Event(self.n_allocations, n_bytes))
        end = weakref.finalize(
            storage, self._forget, address, self.n_allocations, n_bytes
        )
        end.atexit = False
        self._ends[self.n_allocations] = end

    def _forget(self, address: int, number: int, n_bytes: int) -> None:
        # Also after the mode has ended: what dies then is no longer live.
        del self._known[address], self._ends[number]
        self.events.append(Event(number, -n_bytes))
        self.live_bytes -= n_bytes


def _tensors(values: Sequence[object]) -> list[Shaped[Tensor, "..."]]:
    """Return an operator's tensors, which stand alone or in a list."""
    tensors = []
    for value in values:
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Tensor):
                tensors += _with_storages(item)
    return tensors


def _with_storages(tensor: Shaped[Tensor, "..."]) -> list[Shaped[Tensor, "..."]]:
    """Return the tensors that a sparse one consists of, its values last."""
    match tensor.layout:
        case torch.strided:
            return [tensor]
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # of a library that does not show them


def _address(storage: torch.UntypedStorage) -> int:
    """Return what tells storages apart; on "meta" the data has no address."""
    return storage._cdata
