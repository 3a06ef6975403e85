"""A slow link by arithmetic, where the machine cannot make one.

Messages travel over loopback, by gloo, at once. What would cross the link ends later:
not before `labkit.parallel.communication.cost` says it would, from when it began or,
if the link of this rank was still busy, from when that was free. Every rank waits by
itself, so messages of two ranks of a node do not queue up behind each other, except
inside a collective, whose traffic is counted for the whole node. Messages inside a
node are not delayed.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from math import ceil, log2

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.futures import Future

from labkit.parallel.communication import cost
from labkit.parallel.communication.cluster import Cluster, Link

BACKEND = "delayed"
"""The name under which PyTorch makes its groups."""

LATENCY_SECONDS = 50e-6
"""Alpha: about what a message between two processes takes through the kernel."""

AT_ONCE = Link(latency_seconds=0.0, bytes_per_second=1e18)
"""Inside a node nothing is added to what loopback takes."""

Tensors = Sequence[Shaped[Tensor, "..."]]


class Pace:
    """The link of this rank: how fast it is, and when it is free.

    Args:
        bits_per_second: of the link of a node, in one direction.
        ranks_per_node: how many share it.
    """

    def __init__(self, bits_per_second: float, ranks_per_node: int) -> None:
        self.ranks_per_node = ranks_per_node
        self.network = Link(
            latency_seconds=LATENCY_SECONDS,
            bytes_per_second=min(bits_per_second / 8, AT_ONCE.bytes_per_second),
        )
        self._free_at = 0.0
        self._lock = threading.Lock()

    def book(self, seconds: float) -> float:
        """Occupy the link for so long; return when that ends."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + seconds
            return self._free_at


def register(pace: Pace) -> str:
    """Have PyTorch make delayed groups from now on; return their backend's name."""
    dist.Backend.register_backend(
        BACKEND, partial(_group, pace), extended_api=True, devices=["cpu"]
    )
    return BACKEND


def _group(pace: Pace, options: object, _: object) -> "DelayedGroup":
    inner = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    ranks = options.global_ranks_in_group or range(options.group_size)
    return DelayedGroup(inner, [rank // pace.ranks_per_node for rank in ranks], pace)


class LateWork(dist.Work):
    """Work that ends when other work has, and not before a certain time.

    Args:
        work: what is really done.
        end: the time, on the clock of this machine.
        result: what its future holds.
    """

    def __init__(
        self, work: dist.Work, end: float, result: list[Shaped[Tensor, "..."]]
    ) -> None:
        super().__init__()
        self._work, self._end, self._result = work, end, result

    def is_completed(self) -> bool:
        return self._work.is_completed() and time.monotonic() >= self._end

    def wait(self, *_: object) -> bool:
        self._work.wait()
        time.sleep(max(0.0, self._end - time.monotonic()))
        return True

    def get_future(self) -> Future:
        """Return a future that a thread completes; hooks of DDP use it."""
        future = Future()

        def complete() -> None:
            self.wait()
            future.set_result(self._result)

        threading.Thread(target=complete, name="slow link", daemon=True).start()
        return future


class DelayedGroup(dist.ProcessGroup):
    """Some ranks, whose messages between nodes take their time.

    Its methods are those which PyTorch calls, by the names and with the arguments
    that it uses.

    Args:
        inner: sends the messages.
        nodes: of each rank of the group.
        pace: of the link.
    """

    def __init__(
        self, inner: dist.ProcessGroupGloo, nodes: list[int], pace: Pace
    ) -> None:
        super().__init__(inner.rank(), inner.size())
        self._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, inner
        )
        self._inner, self._nodes, self._pace = inner, nodes, pace
        self._node = nodes[inner.rank()]
        self._n_nodes = len(set(nodes))
        self._n_local = max(nodes.count(node) for node in nodes)
        self._cluster = Cluster(
            link=AT_ONCE,
            network=pace.network,
            n_nodes=self._n_nodes,
            gpus_per_node=self._n_local,
            nics_per_node=1,
        )

    def getBackendName(self) -> str:  # noqa: N802, PyTorch's name
        return BACKEND

    def allreduce(self, tensors: Tensors, *options: object) -> dist.Work:
        work = self._inner.allreduce(tensors, *options)
        return self._like(cost.all_reduce, tensors, work, tensors)

    def allreduce_coalesced(self, tensors: Tensors, *options: object) -> dist.Work:
        work = self._inner.allreduce_coalesced(tensors, *options)
        return self._like(cost.all_reduce, tensors, work, tensors)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, *options: object
    ) -> dist.Work:
        work = self._inner.allgather(outputs, inputs, *options)
        return self._like(cost.all_gather, chain(*outputs), work, chain(*outputs))

    def all_gather_single(
        self,
        output: Shaped[Tensor, "..."],
        part: Shaped[Tensor, "..."],
        *options: object,
    ) -> dist.Work:
        work = self._inner._allgather_base(output, part, *options)
        return self._like(cost.all_gather, [output], work, [output])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, *options: object
    ) -> dist.Work:
        return self._last(self.all_gather_single, outputs, inputs, *options)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], *options: object
    ) -> dist.Work:
        work = self._inner.reduce_scatter(outputs, inputs, *options)
        return self._like(cost.reduce_scatter, chain(*inputs), work, outputs)

    def reduce_scatter_single(
        self,
        part: Shaped[Tensor, "..."],
        whole: Shaped[Tensor, "..."],
        *options: object,
    ) -> dist.Work:
        work = self._inner._reduce_scatter_base(part, whole, *options)
        return self._like(cost.reduce_scatter, [whole], work, [part])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, *options: object
    ) -> dist.Work:
        return self._last(self.reduce_scatter_single, outputs, inputs, *options)

    def all_to_all_single(
        self,
        output: Shaped[Tensor, "..."],
        source: Shaped[Tensor, "..."],
        output_sizes: list[int],
        input_sizes: list[int],
        *options: object,
    ) -> dist.Work:
        """Exchange parts, of which every rank of the node sends about as much away."""
        work = self._inner.alltoall_base(
            output, source, output_sizes, input_sizes, *options
        )
        rows = input_sizes or [1] * len(self._nodes)
        share = source.nbytes / max(1, sum(rows))
        return self._exchanged([share * n for n in rows], work, [output])

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, *options: object
    ) -> dist.Work:
        work = self._inner.alltoall(outputs, inputs, *options)
        return self._exchanged([tensor.nbytes for tensor in inputs], work, outputs)

    def broadcast(self, tensors: Tensors, *options: object) -> dist.Work:
        return self._passed(tensors, self._inner.broadcast(tensors, *options))

    def reduce(self, tensors: Tensors, *options: object) -> dist.Work:
        return self._passed(tensors, self._inner.reduce(tensors, *options))

    def gather(
        self, outputs: Sequence[Tensors], inputs: Tensors, *options: object
    ) -> dist.Work:
        work = self._inner.gather(outputs, inputs, *options)
        return self._passed([*inputs] * self._n_local, work)

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], *options: object
    ) -> dist.Work:
        work = self._inner.scatter(outputs, inputs, *options)
        return self._passed([*outputs] * self._n_local, work)

    def send(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        work = self._inner.send(tensors, peer, tag)
        return self._to_or_from(self._nodes[peer], tensors, work)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        work = self._inner.recv(tensors, peer, tag)
        return self._to_or_from(self._nodes[peer], tensors, work)

    def barrier(self, *args: object, **options: object) -> dist.Work:
        work = self._inner.barrier(*args, **options)
        return self._late(work, ceil(log2(self._n_nodes)) * LATENCY_SECONDS)

    def _like(
        self,
        model: Callable[..., cost.Cost],
        tensors: Iterable[Shaped[Tensor, "..."]],
        work: dist.Work,
        result: Iterable[Shaped[Tensor, "..."]],
    ) -> dist.Work:
        """End `work` when a collective of so many tensors would."""
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        return self._late(work, model(self._cluster, n_bytes).seconds, result)

    def _passed(self, tensors: Tensors, work: dist.Work) -> dist.Work:
        """End `work` after one node has sent these to the others."""
        n_bytes = sum(tensor.nbytes for tensor in tensors) * (self._n_nodes - 1)
        return self._late(work, self._pace.network.seconds(n_bytes), tensors)

    def _to_or_from(self, node: int, tensors: Tensors, work: dist.Work) -> dist.Work:
        if node == self._node:
            return work
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        return self._late(work, self._pace.network.seconds(n_bytes), tensors)

    def _exchanged(
        self, n_bytes: list[float], work: dist.Work, result: Tensors
    ) -> dist.Work:
        away = [
            n
            for n, node in zip(n_bytes, self._nodes, strict=True)
            if node != self._node
        ]
        seconds = self._pace.network.seconds(
            self._n_local * sum(away), n_messages=len(away)
        )
        return self._late(work, seconds, result)

    def _last(
        self, collective: Callable[..., dist.Work], *tensors_and_options: object
    ) -> dist.Work:
        """Run a collective for each pair of tensors; return the work of the last."""
        outputs, inputs, *options = tensors_and_options
        works = [
            collective(output, source, *options)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def _late(
        self,
        work: dist.Work,
        seconds: float,
        result: Iterable[Shaped[Tensor, "..."]] = (),
    ) -> dist.Work:
        """Return work that ends with `work`, but not before the link has sent it."""
        if self._n_nodes == 1:
            return work
        return LateWork(work, self._pace.book(seconds), list(result))
