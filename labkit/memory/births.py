"""What is known of each storage from its birth on: when, what, and out of which.

A storage that takes over the values of a smaller one, made in an earlier step, has
grown from it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from labkit.memory.allocations import AllocationCount

_WRITES = frozenset({"copy_", "index_put_", "index_copy_", "scatter_"})


class Birth(NamedTuple):
    """What is known of a storage since it was made."""

    step: int
    n_bytes: int
    looks: str
    """Shape and dtype of the tensor that it was made for."""

    grown_from: tuple[tuple[int, int], ...] = ()
    """Step and bytes of the smaller storages whose values it took over in turn."""

    writes: tuple[tuple[int, int], ...] = ()
    """Step and first position of writes into a part of it, or of those before it."""


class BirthCount(AllocationCount):
    """Counts storages, and keeps the births of those that live."""

    counts_given = True

    def __init__(self) -> None:
        super().__init__()
        self.n_steps = 0
        """Steps that have ended."""
        self.births: dict[int, Birth] = {}

    def end_step(self) -> None:
        """Note that a step has ended."""
        self.n_steps += 1
        self.births = {n: self.births[n] for n in self._ends if n in self.births}
        self.events.clear()

    def living(self) -> dict[int, Birth]:
        """Return the births of the storages that live, by number."""
        return {n: birth for n, birth in self.births.items() if n in self._ends}

    def _after(
        self,
        func: torch._ops.OpOverload,
        inputs: Sequence[Shaped[Tensor, "..."]],
        outputs: Sequence[Shaped[Tensor, "..."]],
        n_before: int,
    ) -> None:
        if self.n_allocations > n_before:
            for tensor in outputs:
                number = self.number_of(tensor) or 0
                if number > n_before:
                    n_bytes = tensor.untyped_storage().nbytes()
                    looks = f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
                    birth = Birth(self.n_steps, n_bytes, looks)
                    self.births[number] = self._with_source(birth, inputs)
        if func.overloadpacket.__name__ in _WRITES:
            self._note_write(func.overloadpacket.__name__, inputs)

    def _note_write(
        self, operator: str, inputs: Sequence[Shaped[Tensor, "..."]]
    ) -> None:
        birth = self.births.get(self.number_of(inputs[0]) or 0)
        start = None if birth is None else _first_written(operator, inputs)
        if birth is None or start is None:
            return
        if birth.step == self.n_steps and not birth.grown_from:
            birth = self._with_source(birth, inputs[1:])
        writes = (*birth.writes, (self.n_steps, start))
        self.births[self.number_of(inputs[0])] = birth._replace(writes=writes)

    def _with_source(
        self, birth: Birth, inputs: Sequence[Shaped[Tensor, "..."]]
    ) -> Birth:
        """Return the birth, with the smaller storage that it takes over, if any."""
        sources = [self.births.get(self.number_of(tensor) or 0) for tensor in inputs]
        sources = [source for source in sources if source is not None]
        if not sources:
            return birth
        now = self.n_steps
        source = max(sources, key=lambda source: (source.step < now, source.n_bytes))
        if source.n_bytes >= birth.n_bytes:
            return birth
        link = ((source.step, source.n_bytes),) if source.step < now else ()
        return birth._replace(grown_from=source.grown_from + link, writes=source.writes)


def _first_written(
    operator: str, inputs: Sequence[Shaped[Tensor, "..."]]
) -> int | None:
    """Return where a write into a part of a storage begins; None if it writes all."""
    if operator == "copy_":
        target = inputs[0]
        is_part = target.nbytes < target.untyped_storage().nbytes()
        return target.storage_offset() if is_part else None
    places = [x for x in inputs[1:-1] if x.dtype == torch.int64 and x.numel()]
    if any(is_fake(x) or x.is_meta for x in places):
        return None
    return max((int(x.min()) for x in places), default=None)
