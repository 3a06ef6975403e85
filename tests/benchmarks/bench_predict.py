"""How long `predict` takes for DeepSeek-V3 on 2,048 ranks, under every policy.

What a slider waits for: each timed call has another micro-batch and sequence than the
one before, and so nothing to remember of the batch. Stages and what lasts on them are
remembered from call to call; the first call works them out, and is shown beside. CPU
time of this process on one thread, the fastest of many calls.
Run with `make bench`, or `python tests/benchmarks/bench_predict.py`.
"""

import random
import sys
import time
from itertools import product

import torch

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory import RECOMPUTE_POLICIES, STATES, predict

V3 = PRESETS["v3-671b"]
LAYOUTS = {
    "pp16 dp128 ep64": Layout(pp=16, dp=128, ep=64),
    "pp16 dp64 tp2 ep64": Layout(pp=16, dp=64, tp=2, ep=64),
}

CEILING_MS = 2.0
"""Most time of a call, by any policy."""

N_CALLS = 100


def policies() -> dict[str, str | tuple[str, ...]]:
    """Return all policies, and one that draws another for each block."""
    names = [name for name in RECOMPUTE_POLICIES if name != "every_k"]
    drawn = random.Random(0).choices(names, k=V3.n_layers + V3.n_mtp)
    return {name: name for name in RECOMPUTE_POLICIES} | {"per block": tuple(drawn)}


def milliseconds(policy: str | tuple[str, ...], layout: Layout) -> tuple[float, float]:
    """Return the time of the first call, and of the fastest of those after it."""
    times = []
    for index in range(N_CALLS):
        micro_batch = 1 + index % 4
        train = TrainConfig(
            micro_batch=micro_batch,
            global_batch=15_360 * micro_batch,
            seq_len=4096 + 64 * index,
            precision="bf16",
        )
        start = time.process_time()
        predict(
            V3,
            train,
            layout,
            "h800",
            recompute=policy,
            states=STATES["deepseek-v3"],
            zero=1,
        )
        times.append(1e3 * (time.process_time() - start))
    return times[0], min(times[1:])


def main() -> int:
    torch.set_num_threads(1)
    print(f"{'policy':12}{'layout':22}{'first':>9}{'then':>9}   of {CEILING_MS} ms")
    slowest = 0.0
    for (name, policy), (where, layout) in product(policies().items(), LAYOUTS.items()):
        first, then = milliseconds(policy, layout)
        slowest = max(slowest, then)
        share = then / CEILING_MS
        print(f"{name:12}{where:22}{first:6.2f} ms{then:6.2f} ms{share:10.2f}")
    verdict = "within" if slowest <= CEILING_MS else "ABOVE"
    print(f"slowest: {slowest:.2f} ms, {verdict} {CEILING_MS} ms")
    return int(slowest > CEILING_MS)


if __name__ == "__main__":
    sys.exit(main())
