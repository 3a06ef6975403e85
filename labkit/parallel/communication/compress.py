"""Gradients that are summed over ranks in fewer bytes, with what was lost kept.

    hook = compress_replicas(ddp, Coded(Int8()))           # DDP
    compress_shards(model, Coded(Narrow("fp8")))           # FSDP2

*Sum by owners.* Narrow numbers cannot be added on their way: a sum of int8 overflows,
and one of BF16 is rounded at every step. So each rank owns a part of the bucket. An
all-to-all brings it everyone's bytes for that part, it adds them in FP32, and an
all-gather brings the sum, in bytes again, to all. That is as many values as a ring
all-reduce sends, 2 (p - 1) / p of the bucket, and all ranks decode the same bytes.

*Error feedback* (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847). What the
bytes do not say is added to the next step's gradient, so that it is late and not lost:
over any number of steps, what all ranks applied and what they still hold is the exact
sum. It takes 4 bytes a parameter, and is not in checkpoints: a resumed run has lost at
most one step's rest.

*Rounds.* A hook of DDP that waits inside a callback for another collective takes a
thread of the backend for as long. gloo has two: with several buckets both wait, and
nobody is left to do what they wait for. PyTorch's `powerSGD_hook` waits so, and hangs
unless there is one bucket. Here a sum is a generator which yields what it waits for;
the thread of the backward pass resumes it when the next bucket is ready, so that
collectives start in the same order on all ranks, whatever the number of buckets.

Gradients are plain sums, as everywhere in `labkit.parallel`. Tested with gloo on CPUs;
on GPUs and with NCCL this has not been run.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.communication.compress_codec import Codec

Rounds = Generator[dist.Work, None, Tensor]
"""Yields each collective it has started, once; resumed after it, returns the sum."""

Shapes = Sequence[tuple[int, ...]]
"""Of the parameters of a bucket, in its order."""


class Sent(NamedTuple):
    """What a rank sends."""

    n_messages: float
    n_bytes: float


@runtime_checkable
class Compression(Protocol):
    """A way to sum a bucket over ranks."""

    @property
    def name(self) -> str:
        """What it is called in tables."""
        ...

    def sum(
        self,
        flat: Float[Tensor, " n"],
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
    ) -> Rounds:
        """Sum a bucket over ranks; it is overwritten on the way.

        Args:
            flat: gradients of all parameters, one after another.
            parameters: whose they are.
            group: the ranks.
        """
        ...

    def expected(self, shapes: Shapes, n_ranks: int) -> Sent:
        """Return what a rank sends for a bucket of parameters of these shapes."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes that are kept from step to step."""
        ...


@dataclass(slots=True, eq=False)
class Coded:
    """Sums by owners, in the bytes of a codec."""

    codec: Codec

    error_feedback: bool = True
    """Whether what the bytes lose is added to the next step's gradients."""

    rest: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False)
    """What is not yet sent, by parameter or shard."""

    @property
    def name(self) -> str:
        """The codec, and whether its errors are forgotten."""
        return self.codec.name + ("" if self.error_feedback else ", no feedback")

    def sum(
        self,
        flat: Float[Tensor, " n"],
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
    ) -> Rounds:
        """Sum a bucket over ranks; it is overwritten on the way."""
        n_ranks, n_values = group.size(), len(flat)
        sizes = [parameter.numel() for parameter in parameters]
        self._recall(flat.split(sizes), parameters)
        rows = F.pad(flat, (0, -n_values % n_ranks)).view(n_ranks, -1)
        rest, arrived = yield from self._exchange(rows, group)
        total = self.codec.decode(arrived, rows.shape[1]).sum(dim=0, keepdim=True)
        part = self.codec.encode(total)
        # Of two roundings the second is its owner's alone to make good.
        rest[group.rank()] += (total - self.codec.decode(part, rows.shape[1]))[0]
        whole = torch.empty_like(arrived)
        yield dist.all_gather_single(whole, part, group=group, async_op=True)
        self._keep(rest.flatten()[:n_values].split(sizes), parameters)
        return self.codec.decode(whole, rows.shape[1]).flatten()[:n_values]

    def scatter(
        self, flat: Float[Tensor, " n"], key: object, group: dist.ProcessGroup
    ) -> Rounds:
        """Return this rank's part of the sum, as a reduce-scatter does, in FP32.

        Args:
            flat: as many values for each rank, one after another.
            key: what the rest is kept under.
            group: the ranks.
        """
        self._recall([flat], [key])
        rows = flat.view(group.size(), -1)
        rest, arrived = yield from self._exchange(rows, group)
        self._keep([rest.flatten()], [key])
        return self.codec.decode(arrived, rows.shape[1]).sum(dim=0)

    def expected(self, shapes: Shapes, n_ranks: int) -> Sent:
        """Return what a rank sends for a bucket of parameters of these shapes.

        >>> from labkit.parallel.communication.compress_codec import Int8
        >>> Coded(Int8()).expected([(64, 64)], n_ranks=4)
        Sent(n_messages=6, n_bytes=6336)
        """
        n_values = sum(prod(shape) for shape in shapes)
        to_each = self.codec.n_bytes(-(-n_values // n_ranks))
        n_messages = 2 * (n_ranks - 1)
        return Sent(n_messages, n_messages * to_each)

    def expected_scatter(self, n_values: int, n_ranks: int) -> Sent:
        """Return what a rank sends for a part of the sum of so many values."""
        n_messages = n_ranks - 1
        return Sent(n_messages, n_messages * self.codec.n_bytes(n_values // n_ranks))

    @property
    def state_bytes(self) -> int:
        """Bytes that are kept from step to step: 4 a parameter, with feedback."""
        return sum(tensor.numel() * 4 for tensor in self.rest.values())

    def _exchange(
        self, rows: Float[Tensor, "p m"], group: dist.ProcessGroup
    ) -> Generator[dist.Work, None, tuple[Tensor, Tensor]]:
        """Give each rank its row; return what the bytes lost, and what came in."""
        given = self.codec.encode(rows)
        arrived = torch.empty_like(given)
        handle = dist.all_to_all_single(arrived, given, group=group, async_op=True)
        rest = rows - self.codec.decode(given, rows.shape[1])
        yield handle
        return rest, arrived

    def _recall(self, gradients: Sequence[Tensor], keys: Sequence[object]) -> None:
        for gradient, key in zip(gradients, keys, strict=True):
            if key in self.rest:
                gradient += self.rest[key]

    def _keep(self, rests: Sequence[Tensor], keys: Sequence[object]) -> None:
        if self.error_feedback:
            self.rest.update(zip(keys, map(finite, rests), strict=True))


def finite(rest: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return what is kept: a step that overflowed leaves nothing to the next."""
    return rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def finish(rounds: Rounds) -> Float[Tensor, "..."]:
    """Return what a sum returns, waiting for each round."""
    while True:
        try:
            next(rounds).wait()
        except StopIteration as done:
            return done.value


@dataclass(slots=True, eq=False)
class BucketSums:
    """The sums of DDP's buckets that are under way in a backward pass."""

    compression: Compression
    group: dist.ProcessGroup

    buckets: list[list[tuple[int, ...]]] = field(default_factory=list, init=False)
    """Shapes of the parameters in each bucket of the last step."""

    _pending: list["_Pending"] = field(default_factory=list, init=False, repr=False)

    def start(
        self, bucket: dist.GradBucket
    ) -> torch.futures.Future[Float[Tensor, "n"]]:
        """Begin to sum a bucket, and go on with those before it."""
        if bucket.index() == 0:
            self.buckets.clear()
            self._pending.clear()
        before = self._pending
        self._pending = [self._begin(bucket)]
        future = self._pending[0].future
        self._pending = [each for each in before if each.go_on()] + self._pending
        while bucket.is_last() and self._pending:
            self._pending = [each for each in self._pending if each.go_on()]
        return future

    def expected(self) -> Sent:
        """Return what a rank sends in a step, with the buckets of the last one."""
        n_ranks = self.group.size()
        each = [self.compression.expected(shapes, n_ranks) for shapes in self.buckets]
        return Sent(*(sum(column) for column in zip(*each, strict=True)))

    def _begin(self, bucket: dist.GradBucket) -> "_Pending":
        buffer, parameters = bucket.buffer(), bucket.parameters()
        self.buckets.append([tuple(each.shape) for each in parameters])
        rounds = self.compression.sum(buffer.float(), parameters, self.group)
        devices = [buffer.device] if buffer.is_cuda else None
        pending = _Pending(rounds, buffer, torch.futures.Future(devices=devices))
        pending.go_on()
        return pending


@dataclass(slots=True, eq=False)
class _Pending:
    """A bucket whose sum is under way."""

    rounds: Rounds
    buffer: Tensor
    future: torch.futures.Future
    handle: dist.Work | None = None

    def go_on(self) -> bool:
        """Wait for the round under way and begin the next; return if there is one."""
        if self.handle is not None:
            self.handle.wait()
        try:
            self.handle = next(self.rounds)
        except StopIteration as done:
            self.future.set_result(self.buffer.copy_(done.value))
            return False
        return True


def _sum_bucket(
    sums: BucketSums, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Return the sum over ranks of a bucket of DDP, when it is there."""
    return sums.start(bucket)


def compress_replicas(
    ddp: DistributedDataParallel, compression: Compression
) -> BucketSums:
    """Let DDP sum gradients that way, and return the hook's state.

    DDP takes one hook only, and no mean: gradients become sums.
    """
    sums = BucketSums(compression, ddp.process_group)
    if sums.group.size() > 1:
        ddp.register_comm_hook(sums, _sum_bucket)
    return sums
