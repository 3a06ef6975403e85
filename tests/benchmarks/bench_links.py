"""Two nodes of two ranks and 400 Mbit/s between them: what moves less, and what hides.

The link is real where the machine allows it, two network namespaces with a limit, and
bytes are those that leave a node's device, headers and all. Where it is modelled, this
says so, and shows no bytes of the wire. Then the same without a limit, where fewer
bytes buy little and more messages cost.

    dispatch   one way to experts and back, top 6 of 16, of 512 tokens of 256: flat in
               FP32; to the node once, in BF16, with tokens limited to one node
    overlap    an all-reduce under products of matrices; and, for comparison, under a
               pause, which takes no processor from the ranks and from gloo
    levels     an all-reduce of 4 MiB, flat and in two levels

Run with `make bench`, or `python tests/benchmarks/bench_links.py [REPEATS]`.
"""

import math
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.hardware.units import rate
from labkit.parallel.communication.calibrate import calibrate, seconds_of
from labkit.parallel.communication.cost import all_reduce
from labkit.parallel.communication.exchange import expert_exchange
from labkit.parallel.communication.hierarchy import (
    hierarchical_all_reduce,
    nodes_of,
)
from labkit.parallel.communication.overlap import (
    Overlap,
    interleave,
    measure_overlap,
    through_experts,
)
from labkit.parallel.communication.slow_link import bytes_sent, slow_link
from labkit.parallel.launch import launch

N_RANKS, N_NODES = 4, 2
SLOW = 400e6

N_TOKENS, DIM, N_EXPERTS, K = 512, 256, 16, 6

REDUCED_BYTES = 4 << 20
HIDDEN_BYTES = 8 << 20

LONGER = 1.5
"""What hides an all-reduce, over the time of that."""

SETTLE_SECONDS = 0.2
"""Until all that was sent has left the device."""

CALIBRATED = (1 << 10, 1 << 20, 1 << 21, 1 << 22, 1 << 23)
"""Bytes; what is shorter than the bucket of the link (128 kB) passes at once."""

BARS = {
    "bytes of dispatch": ("<=", 0.15),
    "time of dispatch": ("<=", 0.4),
    "hidden": (">=", 0.8),
    "speed-up of two levels": (">=", 1.15),
}
"""Over flat FP32; of an all-reduce; over a flat one. On the slow link."""


def routed(is_limited: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens of a rank, with experts drawn alike for all; or of one node."""
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    x = torch.randn(N_TOKENS, DIM, generator=generator)
    affinity = torch.rand(N_TOKENS, N_EXPERTS, generator=generator)
    if is_limited:
        groups = affinity.unflatten(1, (N_NODES, -1))
        best = groups.topk(2, dim=-1).values.sum(dim=-1).argmax(dim=1)
        affinity = groups.masked_fill(
            torch.arange(N_NODES)[:, None] != best[:, None, None], 0
        ).flatten(1)
    weights, experts = affinity.topk(K, dim=1)
    return x, weights / weights.sum(dim=1, keepdim=True), experts


def dispatches() -> dict[str, Callable[[], object]]:
    """Return ways of tokens to their experts and back, with experts that do nothing."""
    ranks = list(range(N_RANKS))
    ways = {
        "flat fp32": (1, "fp32", False),
        "limited, by node, bf16": (N_NODES, "bf16", True),
        "limited, by node, fp8": (N_NODES, "fp8", True),
    }
    works = {}
    for name, (n_nodes, payload, is_limited) in ways.items():
        exchange = expert_exchange(
            ranks,
            N_EXPERTS,
            payload=payload,
            n_nodes=n_nodes,
            deduplicate=n_nodes > 1,
        )
        tokens = routed(is_limited)
        works[name] = lambda exchange=exchange, tokens=tokens: interleave(
            through_experts(exchange, as_they_are, *tokens)
        )
    return works


def as_they_are(arrived, own: range) -> torch.Tensor:
    return arrived.values


def node_bytes(work: Callable[[], object]) -> int:
    """Return what this node's device sent for a work, or 0 where there is none."""
    dist.barrier()
    time.sleep(SETTLE_SECONDS)
    try:
        before = bytes_sent()
    except ValueError:
        before = None
    dist.barrier()  # the other rank of the node may not begin before
    work()
    dist.barrier()
    time.sleep(SETTLE_SECONDS)
    return 0 if before is None else bytes_sent() - before


def all_reduces() -> dict[str, Callable[[], object]]:
    nodes = nodes_of(N_NODES)
    whole = torch.zeros(REDUCED_BYTES // 4)
    return {
        "flat": lambda: dist.all_reduce(whole),
        "two levels": lambda: hierarchical_all_reduce(whole, nodes),
    }


def overlaps(n_repeats: int) -> dict[str, Overlap]:
    """Hide an all-reduce under what takes half as long again."""
    message, matrix = torch.zeros(HIDDEN_BYTES // 4), torch.randn(256, 256)

    def products(n: int) -> None:
        for _ in range(n):
            torch.mm(matrix, matrix)

    def communicate() -> None:
        dist.all_reduce(message)

    taken = seconds_of(
        {"sent": communicate, "computed": lambda: products(50)}, n_repeats=3
    )
    n = max(1, math.ceil(50 * LONGER * taken["sent"] / taken["computed"]))
    computes = {
        "products": lambda: products(n),
        "a pause": lambda: time.sleep(LONGER * taken["sent"]),
    }
    found = {}
    for name, compute in computes.items():

        def together(compute: Callable[[], object] = compute) -> None:
            handle = dist.all_reduce(message, async_op=True)
            compute()
            handle.wait()

        found[name] = measure_overlap(
            compute, communicate, together, n_repeats=n_repeats
        )
    return found


def work_of_a_rank(n_repeats: int) -> dict:
    ways, reduces = dispatches(), all_reduces()
    found = {
        "seconds": seconds_of(ways | reduces, n_repeats=n_repeats),
        "bytes": {name: node_bytes(work) for name, work in (ways | reduces).items()},
        "overlaps": overlaps(n_repeats),
    }
    try:
        measured = calibrate(nodes_of(N_NODES), sizes=CALIBRATED)
    except ValueError as error:
        found["calibration"] = f"not calibrated: {error}"
        return found
    predicted = {
        name: all_reduce(measured.cluster, REDUCED_BYTES, algorithm=algorithm).seconds
        for name, algorithm in (("flat", "ring"), ("two levels", "hierarchical"))
    }
    return found | {"calibration": repr(measured), "predicted": predicted}


def figures(found: dict) -> dict[str, float]:
    """Return what bars are set for."""
    seconds, sent = found["seconds"], found["bytes"]
    limited = "limited, by node, bf16"
    return {
        "bytes of dispatch": sent[limited] / max(sent["flat fp32"], 1),
        "time of dispatch": seconds[limited] / seconds["flat fp32"],
        "hidden": found["overlaps"]["products"].hidden,
        "speed-up of two levels": seconds["flat"] / seconds["two levels"],
    }


def show(found: dict, link: object) -> None:
    print(f"\n{link}")
    for name, seconds in found["seconds"].items():
        sent = found["bytes"][name]
        predicted = found.get("predicted", {}).get(name)
        extra = f"{sent / 1e6:8.2f} MB leave a node" if sent else ""
        if predicted:
            extra += f"   predicted {predicted * 1e3:.0f} ms"
        print(f"  {name:24}{seconds * 1e3:8.1f} ms {extra}")
    for name, parts in found["overlaps"].items():
        print(
            f"  all-reduce {parts.communication_seconds * 1e3:.0f} ms, {name} "
            f"{parts.compute_seconds * 1e3:.0f} ms, together "
            f"{parts.together_seconds * 1e3:.0f} ms: {parts.hidden:.0%} hidden"
        )
    print("  " + found["calibration"].replace("\n", "\n  "))


def main() -> None:
    n_repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    passed = True
    for bits_per_second in (SLOW, math.inf):
        with slow_link(bits_per_second, n_nodes=N_NODES) as link:
            found = launch(work_of_a_rank, N_RANKS, n_repeats, timeout=900, link=link)
        show(found[0], link)
        is_judged = bits_per_second == SLOW
        for name, value in figures(found[0]).items():
            sign, bar = BARS[name]
            has_passed = value <= bar if sign == "<=" else value >= bar
            passed = passed and (has_passed or not is_judged)
            words = f"(bar {sign} {bar}{'' if has_passed else ', missed'})"
            print(f"  {name:24}{value:8.2f} {words if is_judged else ''}", flush=True)
    print(f"{rate(SLOW, 'bit/s')}: {'every bar reached' if passed else 'a bar missed'}")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
