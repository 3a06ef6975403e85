"""This machine's collectives, timed, and the cluster that the cost model makes of them.

    nodes = nodes_of(2)                  # in each rank
    measured = calibrate(nodes)
    all_reduce(measured.cluster, 1e8)    # predicted, on this machine

What is timed is what a step waits for: all ranks begin together, and the slowest
counts; of several repeats the median. The fit is alpha-beta (`fit`), the form that of
the algorithm that a GPU's library would take. gloo's own differ here and there (its
reduce-scatter is an all-reduce, and is not timed), so that alpha and beta are what its
collectives come to, not the wire's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from labkit.config.checks import require_choice, require_whole
from labkit.parallel.communication.cluster import Cluster
from labkit.parallel.communication.fit import Fit, fit
from labkit.parallel.communication.forms import form
from labkit.parallel.communication.hierarchy import Nodes

TIMED = ("all_reduce", "all_gather", "all_to_all")
"""What can be timed."""

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
"""Bytes, short to long."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Calibration:
    """Links of a machine, by the collectives that were timed on them."""

    inside: dict[str, Fit]
    """Of ranks of a node; empty if each is alone."""

    across: dict[str, Fit]
    """Of ranks of the same place in all nodes, which share the link between nodes."""

    n_nodes: int
    per_node: int

    @property
    def cluster(self) -> Cluster:
        """The machine as the cost model takes it, by its all-reduce.

        All ranks of a node used the link to others at once, so each has its share.
        """
        one = self.inside or self.across
        other = self.across or self.inside
        return Cluster(
            link=one["all_reduce"].link,
            network=other["all_reduce"].link,
            n_nodes=self.n_nodes,
            gpus_per_node=self.per_node,
        )

    def __repr__(self) -> str:
        lines = [f"{self.n_nodes} nodes of {self.per_node}"]
        for where, fits in (("inside", self.inside), ("across", self.across)):
            lines += [f"  {where:8}{name:12}{found}" for name, found in fits.items()]
        return "\n".join(lines)


def seconds_of(
    works: dict[str, Callable[[], object]], *, n_repeats: int = 5
) -> dict[str, float]:
    """Return what each work takes when all ranks do it together.

    Works take turns, so that a machine that slows down slows all of them. Once, before
    the first turn, each is done without a clock.

    Args:
        works: by name; every rank gives the same.
        n_repeats: turns, of which the median counts; of the ranks the slowest.
    """
    require_whole({"n_repeats": n_repeats})
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(n_repeats + 1):
        for name, work in works.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            if turn:
                taken[name].append(time.perf_counter() - start)
    slowest = torch.tensor(list(taken.values()), dtype=torch.float64)  # (works, turns)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {
        name: median(row) for name, row in zip(works, slowest.tolist(), strict=True)
    }


def time_collective(
    collective: str,
    n_bytes: int,
    group: dist.ProcessGroup | None = None,
    *,
    n_repeats: int = 5,
) -> float:
    """Return the seconds that a collective of so many bytes takes, median of repeats.

    Ranks of other groups must do the same at the same time.
    """
    require_choice({"collective": collective}, TIMED)
    n = dist.get_world_size(group)
    whole = torch.zeros(max(1, n_bytes // (4 * n)) * n)
    part, other = whole.chunk(n)[0].clone(), torch.empty_like(whole)
    work = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(other, part, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }[collective]
    return seconds_of({"": work}, n_repeats=n_repeats)[""]


Timer = Callable[[str, int, dist.ProcessGroup], float]


def calibrate(
    nodes: Nodes,
    *,
    collectives: Sequence[str] = TIMED,
    sizes: Sequence[int] = SIZES,
    timer: Timer = time_collective,
) -> Calibration:
    """Time collectives inside nodes and between them; every rank calls it.

    All ranks get the same answer.

    Args:
        nodes: the groups of this rank.
        collectives: of `TIMED`; `all_reduce` must be one, for the cluster.
        sizes: bytes of the whole, as `forms` counts them; at least three.
        timer: returns the seconds of a collective, of so many bytes, in a group.

    Raises:
        ValueError: no such collective, or times that do not grow with sizes, as happens
            where others use the machine.
    """
    for name in collectives:
        require_choice({"collective": name}, TIMED)

    def fits(group: dist.ProcessGroup) -> dict[str, Fit]:
        if group.size() == 1:
            return {}
        return {
            name: fit(
                sizes,
                [timer(name, n, group) for n in sizes],
                form=form(name, group.size()),
            )
            for name in collectives
        }

    return Calibration(
        inside=fits(nodes.inside),
        across=fits(nodes.across),
        n_nodes=nodes.n_nodes,
        per_node=nodes.per_node,
    )
