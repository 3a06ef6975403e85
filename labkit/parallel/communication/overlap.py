"""Communication while something else is computed: what is started and waited for later.

*Buckets.* `GradientBuckets` sums gradients over ranks while the backward pass goes on,
as DDP does, also where DDP cannot: for DTensors, experts, stages of a pipeline.

*Micro-batches in turn.* A pass is a generator, which yields whenever something of its
own is on its way; `interleave` then goes on with another. So the tokens of one
micro-batch travel to their experts while attention of the other is computed. Autograd
takes later operations first, so that the backward pass of both is interleaved, too.
The order is fixed, and the same on all ranks, as collectives demand.

*How much is hidden* is measured: 1 - (together - compute) / communication. On loopback
this says nothing, as there the processor does both. On GPUs and with NCCL nothing of
this has been run.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.config.checks import require_whole
from labkit.parallel.communication.calibrate import seconds_of
from labkit.parallel.communication.exchange import Exchange, Journey
from labkit.parallel.communication.exchange_trip import combine_trip, land, launch

Result = TypeVar("Result")

BUCKET_BYTES = 25 << 20
"""Of gradients in one message, as DDP has it."""


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Return when it is done."""
        ...


Pass = Generator[Handle | None, None, Result]
"""Yields what it waits for, or None if it waits by itself when it is resumed."""


def interleave(*passes: Pass) -> list[Any]:
    """Run passes in turn, each until it waits, and return what they return.

    >>> def work(name, log):
    ...     log.append(name + " begins")
    ...     yield None
    ...     log.append(name + " ends")
    ...     return name
    >>> log = []
    >>> interleave(work("a", log), work("b", log))
    ['a', 'b']
    >>> log
    ['a begins', 'b begins', 'a ends', 'b ends']
    """
    results: list[Any] = [None] * len(passes)
    waiting: dict[int, Handle | None] = dict.fromkeys(range(len(passes)))
    while waiting:
        for index, handle in tuple(waiting.items()):
            if handle is not None:
                handle.wait()
            try:
                waiting[index] = next(passes[index])
            except StopIteration as done:
                results[index] = done.value
                del waiting[index]
    return results


def through_experts(
    exchange: Exchange,
    compute: Callable[[Any, range], Tensor],
    x: Float[Tensor, "n d"],
    weights: Float[Tensor, "n k"],
    experts: Int[Tensor, "n k"],
) -> Pass:
    """Send tokens to experts and back; wait nowhere that another pass could use.

    Args:
        exchange: the way to the experts of all ranks.
        compute: returns, for what arrived and this rank's experts, a row for each row.
        x: tokens.
        weights: of their choices.
        experts: their choices.
    """
    journey = exchange.send(x, weights, experts)
    yield None
    results = compute(journey.arrived(), exchange.own)
    return (yield from _back(journey, results))


def _back(journey: Journey, results: Tensor) -> Pass:
    for hop in reversed(journey.hops):
        trip = combine_trip(hop, journey.exchange.payload, results)
        promises = launch(trip, results)
        yield None
        (results,) = land(trip, promises)
    return results


class GradientBuckets:
    """Sums gradients over ranks, a bucket at a time, while others are computed.

    A bucket starts when the gradients of all its parameters are there and the buckets
    before it have started. Gradients that a rank does not have count as zero.

    Args:
        parameters: of which each rank of the group gives as many, in the same order.
        group: over which they are summed; a DTensor's local part is.
        bucket_bytes: after which a bucket is full.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        require_whole({"bucket_bytes": bucket_bytes})
        self.group = group
        self.buckets = _buckets(
            [p for p in parameters if p.requires_grad], bucket_bytes
        )
        self._bucket = {p: i for i, b in enumerate(self.buckets) for p in b}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._arrived) for p in self._bucket
        ]
        self._is_last = True
        self._begin()

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Add gradients up on this rank only, except in the step's last backward."""
        self._is_last = is_last
        yield

    def finish(self) -> None:
        """Wait for the sums, after the last backward pass of the step."""
        while len(self._sums) < len(self.buckets):
            self._start()
        for bucket, (message, handle) in zip(self.buckets, self._sums, strict=True):
            handle.wait()
            gradients = _gradients(bucket)
            totals = message.split([gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, totals, strict=True):
                gradient.copy_(total.view_as(gradient))
        self._begin()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        self._n_missing = [len(bucket) for bucket in self.buckets]
        self._sums: list[tuple[Tensor, dist.Work]] = []

    def _arrived(self, parameter: nn.Parameter) -> None:
        if not self._is_last:
            return
        self._n_missing[self._bucket[parameter]] -= 1
        while (
            len(self._sums) < len(self.buckets) and not self._n_missing[len(self._sums)]
        ):
            self._start()

    def _start(self) -> None:
        gradients = _gradients(self.buckets[len(self._sums)])
        message = torch.cat([gradient.flatten() for gradient in gradients])
        handle = dist.all_reduce(message, group=self.group, async_op=True)
        self._sums.append((message, handle))


def _buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int
) -> list[list[nn.Parameter]]:
    """Return parameters in buckets, the last ones first, one dtype in each."""
    buckets: list[list[nn.Parameter]] = []
    n_bytes = 0
    for parameter in reversed(parameters):
        is_other = not buckets or buckets[-1][0].dtype != parameter.dtype
        if is_other or n_bytes >= bucket_bytes:
            buckets.append([])
            n_bytes = 0
        buckets[-1].append(parameter)
        n_bytes += _local(parameter).nbytes
    return buckets


def _gradients(bucket: Sequence[nn.Parameter]) -> list[Tensor]:
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [_local(parameter.grad) for parameter in bucket]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What computing and communicating take, apart and together."""

    compute_seconds: float
    communication_seconds: float
    together_seconds: float

    @property
    def exposed_seconds(self) -> float:
        """What communication adds to the time of computing."""
        return self.together_seconds - self.compute_seconds

    @property
    def hidden(self) -> float:
        """Of the communication, the share that computing hides; below 0 if it costs.

        >>> Overlap(
        ...     compute_seconds=0.3, communication_seconds=0.2, together_seconds=0.35
        ... ).hidden.__round__(2)
        0.75
        """
        return 1 - self.exposed_seconds / self.communication_seconds


def measure_overlap(
    compute: Callable[[], object],
    communicate: Callable[[], object],
    together: Callable[[], object],
    *,
    n_repeats: int = 5,
) -> Overlap:
    """Return what is hidden; every rank calls it with the same.

    Args:
        compute: what there is to compute, alone.
        communicate: what there is to send, alone.
        together: both, overlapped.
        n_repeats: of which the median counts.
    """
    works = {
        "compute_seconds": compute,
        "communication_seconds": communicate,
        "together_seconds": together,
    }
    return Overlap(**seconds_of(works, n_repeats=n_repeats))
