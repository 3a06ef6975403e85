"""One hop of rows between ranks, in either direction, and its gradient.

A trip outward copies rows to ranks; a trip homeward sums what these made of them. Each
is the other's adjoint: the backward pass of one sends as the other does.

`launch` begins a trip and `land` ends it, and something else may be computed between
them. In the backward pass `land` begins the adjoint and `launch` ends it, so that the
gradient of what was computed between is computed between again: autograd takes the
later of two operations first.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from labkit.parallel.communication.payload import Payload, RowFormat


class Lanes(NamedTuple):
    """Two groups of the same ranks, one for each pass of autograd.

    A pipeline may run a forward and a backward pass at once, in two threads; messages
    of one must not be taken for messages of the other.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """Which rows go to which ranks of a group."""

    lanes: Lanes

    token: Int[Tensor, "p"]
    """Of each copy the row it is of; copies are sorted by the rank they go to."""

    choice: Int[Tensor, "p"]
    """Of each copy the row of weights and experts that goes with it."""

    shape: tuple[int, int]
    """Rows, and choices of each."""

    n_choices: int
    """Those that go with a copy: all of its row, or one."""

    sent: list[int]
    """Copies to each rank."""

    received: list[int]
    """Copies from each rank."""


class Trip:
    """Rows on their way over one hop, in one direction."""

    adjoint: "Trip"
    """The other direction, for gradients."""

    def __init__(self, hop: Hop, rows: RowFormat, group: dist.ProcessGroup) -> None:
        self.hop, self.rows, self.group = hop, rows, group
        self._pending: tuple[dist.Work, Tensor, Tensor] | None = None

    def start(
        self, values: Float[Tensor, "m d"], *weights: Float[Tensor, "m k"]
    ) -> None:
        """Send rows, and return before they have arrived."""
        raise NotImplementedError

    def finish(self) -> tuple[Float[Tensor, "..."], ...]:
        """Wait for rows; return their values, and their weights if they have some."""
        raise NotImplementedError

    def shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of what `finish` returns."""
        raise NotImplementedError

    def promises(self) -> tuple[Float[Tensor, "..."], ...]:
        """Return tensors without storage of their own, in shapes of `finish`."""
        dtypes = (self.rows.dtype, torch.float32)
        return tuple(
            self.hop.token.new_zeros((), dtype=dtype).expand(shape)
            for dtype, shape in zip(dtypes, self.shapes(), strict=False)
        )

    def _post(
        self, rows: UInt8[Tensor, "p bytes"], sent: list[int], received: list[int]
    ) -> None:
        arriving = rows.new_empty((sum(received), rows.shape[1]))
        work = dist.all_to_all_single(
            arriving, rows, received, sent, group=self.group, async_op=True
        )
        self._pending = work, rows, arriving  # all are in use until it is done

    def _arrived(self) -> UInt8[Tensor, "q bytes"]:
        assert self._pending is not None
        work, _, arriving = self._pending
        work.wait()
        self._pending = None
        return arriving


class Outward(Trip):
    """Copies of rows on their way to the ranks of their experts.

    Attributes:
        experts: the choices that go with them; after `finish`, those that came.
    """

    experts: Int[Tensor, "n k"] | None = None

    def start(
        self, values: Float[Tensor, "m d"], *weights: Float[Tensor, "m k"]
    ) -> None:
        hop, k = self.hop, self.hop.n_choices
        parts = [part.reshape(-1, k)[hop.choice] for part in weights]
        if self.experts is not None:
            parts.append(self.experts.reshape(-1, k)[hop.choice])
        packed = self.rows.pack(values.index_select(0, hop.token), *parts)
        self._post(packed, hop.sent, hop.received)

    def finish(self) -> tuple[Float[Tensor, "..."], ...]:
        rows = self._arrived()
        if self.experts is not None:
            self.experts = self.rows.experts(rows).long()
        if not self.rows.n_weights:
            return (self.rows.values(rows),)
        return self.rows.values(rows), self.rows.weights(rows)

    def shapes(self) -> list[tuple[int, int]]:
        n_rows = sum(self.hop.received)
        shapes = [(n_rows, self.rows.dim), (n_rows, self.hop.n_choices)]
        return shapes if self.rows.n_weights else shapes[:1]


class Homeward(Trip):
    """Results of copies on their way back, to be summed by row."""

    def start(
        self, values: Float[Tensor, "m d"], *weights: Float[Tensor, "m k"]
    ) -> None:
        self._post(self.rows.pack(values, *weights), self.hop.received, self.hop.sent)

    def finish(self) -> tuple[Float[Tensor, "..."], ...]:
        rows, (n_tokens, k) = self._arrived(), self.hop.shape
        values = sum_by(self.rows.values(rows), self.hop.token, n_tokens)
        if not self.rows.n_weights:
            return (values,)
        weights = self.rows.weights(rows)
        n_rows = n_tokens * k // self.hop.n_choices
        return values, sum_by(weights, self.hop.choice, n_rows).view(n_tokens, k)

    def shapes(self) -> list[tuple[int, int]]:
        n_tokens, k = self.hop.shape
        shapes = [(n_tokens, self.rows.dim), (n_tokens, k)]
        return shapes if self.rows.n_weights else shapes[:1]


def dispatch_trip(
    hop: Hop,
    payload: Payload,
    values: Float[Tensor, "n d"],
    experts: Int[Tensor, "n k"],
) -> Outward:
    """Return the trip of rows, weights and choices to experts."""
    k, (dim, dtype) = hop.n_choices, (values.shape[1], values.dtype)
    there = RowFormat(
        dim=dim, dtype=dtype, format=payload.there, n_weights=k, n_experts=k
    )
    back = RowFormat(dim=dim, dtype=dtype, format=payload.back, n_weights=k)
    trip = Outward(hop, there, hop.lanes.forward)
    trip.experts = experts
    trip.adjoint = Homeward(hop, back, hop.lanes.backward)
    return trip


def combine_trip(hop: Hop, payload: Payload, values: Float[Tensor, "q d"]) -> Homeward:
    """Return the trip of results from experts."""
    dim, dtype = values.shape[1], values.dtype
    there = RowFormat(dim=dim, dtype=dtype, format=payload.there)
    back = RowFormat(dim=dim, dtype=dtype, format=payload.back)
    trip = Homeward(hop, back, hop.lanes.forward)
    trip.adjoint = Outward(hop, there, hop.lanes.backward)
    return trip


def sum_by(
    rows: Float[Tensor, "p d"], goal: Int[Tensor, "p"], n_goals: int
) -> Float[Tensor, "n d"]:
    """Return, for each goal, the sum of the rows that have it; always in one order.

    >>> sum_by(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 0, 2]), 3).tolist()
    [[2.0], [0.0], [5.0]]
    """
    if not len(rows):
        return rows.new_zeros(n_goals, rows.shape[1])
    counts = goal.bincount(minlength=n_goals)
    starts = counts.cumsum(0) - counts
    order = goal.argsort(stable=True)
    return F.embedding_bag(order, rows, starts, mode="sum")


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, trip: Trip, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        trip.start(*parts)
        return trip.promises()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *promises: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.trip.adjoint.finish()


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, trip: Trip, *promises: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        return trip.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.adjoint.start(*grads)
        return None, *ctx.trip.promises()


def launch(
    trip: Trip, *parts: Float[Tensor, "m ..."]
) -> tuple[Float[Tensor, "..."], ...]:
    """Begin a trip with values, and weights if it takes some; return what to land."""
    return _Launch.apply(trip, *parts)


def land(
    trip: Trip, promises: tuple[Float[Tensor, "..."], ...]
) -> tuple[Float[Tensor, "..."], ...]:
    """End the trip that returned these promises; return what arrived."""
    return _Land.apply(trip, *promises)
