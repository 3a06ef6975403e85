"""Recompute: predicted extra time and peak beside measured ones, and what budgets buy.

One model, "small" at 4 x 256 in FP32 and BF16; its policies take turns, each between
two steps without recompute that it is compared with; medians. A step is forward,
backward, clipping and a fused AdamW update, timed as the processor time of one thread,
which other work on the machine disturbs least. Budgets lie evenly between the
least and the most that the step can need; each is set beside the cheapest policy by
name that keeps it.
Run with `make bench`, or `python tests/benchmarks/bench_recompute.py`.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from labkit.config import PRESETS, TrainConfig
from labkit.memory import apply_recompute, measure, predict
from labkit.memory.budget import budget
from labkit.memory.cost import recompute_cost
from labkit.memory.recompute import RECOMPUTE_POLICIES, block_policies
from labkit.model import Transformer

CFG = PRESETS["small"]
N_BLOCKS = CFG.n_layers + CFG.n_mtp
EVERY = (2, 3, 4, 6)
"""The k of "every_k"; other k are these for so few blocks, or near to one of them."""

SHARES = (0.15, 0.4, 0.65, 0.9)
"""Of the way from the least bytes to the most, where budgets are set."""

FURTHEST = {"fp32": 0.05, "bf16": 0.08}
"""Most by which a predicted extra time may miss the measured one. All products are
taken for equally fast; the small ones that "selective" runs again are not in BF16."""

SLOWER = 0.03
"""Most that a budget's step may take longer than the best policy by name, measured."""

Policies = tuple[str, ...]

PLAIN = ("none",) * N_BLOCKS


def by_name() -> dict[str, Policies]:
    """Return every policy by name, "every_k" with several k."""
    named = {
        name: block_policies(name, N_BLOCKS)
        for name in RECOMPUTE_POLICIES
        if name != "every_k"
    }
    return named | {
        f"every {k}": block_policies("every_k", N_BLOCKS, k=k) for k in EVERY
    }


def training_step(precision: str) -> tuple[Transformer, Callable[[], None]]:
    """Return a model, and what does one step with it."""
    model = Transformer(CFG, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    source = torch.Generator().manual_seed(0)
    text = torch.randint(256, (4, 257), generator=source)

    def step() -> None:
        tokens = text.clone()
        with torch.autocast("cpu", enabled=precision == "bf16"):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:]).total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def extra_times(
    model: Transformer,
    step: Callable[[], None],
    policies: Sequence[Policies],
    n_rounds: int,
) -> dict[Policies, float]:
    """Return each policy's extra time, as a share of steps without recompute."""

    def seconds(each: Policies) -> float:
        apply_recompute(model, each)
        start = time.process_time()
        step()
        return time.process_time() - start

    ratios: dict[Policies, list[float]] = {each: [] for each in policies}
    for round_index in range(n_rounds + 1):
        before = seconds(PLAIN)
        for each in policies:
            own, after = seconds(each), seconds(PLAIN)
            if round_index:  # the first one finds nothing allocated
                ratios[each].append(2 * own / (before + after) - 1)
            before = after
    return {each: statistics.median(found) for each, found in ratios.items()}


def measured_peak(model: Transformer, step: Callable[[], None], each: Policies) -> int:
    apply_recompute(model, each)
    step()
    return measure(step, model).peak


def budgets(train: TrainConfig, peaks: Mapping[Policies, int]) -> dict[int, Policies]:
    least, most = min(peaks.values()), max(peaks.values())
    limits = [int(least + share * (most - least)) for share in SHARES]
    found = {}
    for n_bytes in limits:
        start = time.process_time()
        found[n_bytes] = budget(n_bytes, CFG, train)
        print(
            f"  budget {n_bytes / 2**20:.0f} MiB answered in "
            f"{(time.process_time() - start) * 1e3:.0f} ms"
        )
    return found


def compare(precision: str, n_rounds: int) -> bool:
    train = TrainConfig(micro_batch=4, global_batch=4, precision=precision)
    named = by_name()
    peaks = {
        policies: predict(CFG, train, recompute=policies).peak
        for policies in named.values()
    }
    print(f"{precision}, {n_rounds} rounds")
    bought = budgets(train, peaks)
    model, step = training_step(precision)
    every = [*dict.fromkeys([*named.values(), *bought.values()])]
    measured = extra_times(model, step, every, n_rounds)
    passed, furthest = True, FURTHEST[precision]
    head = "extra time", "predicted", "peak MiB", "predicted"
    print(" " * 12, *(f"{name:>10}" for name in head))

    def line(name: str, each: Policies) -> None:
        cost, peak = recompute_cost(CFG, train, each), measured_peak(model, step, each)
        needed = predict(CFG, train, recompute=each).peak
        print(
            f"{name:12} {measured[each]:10.1%} {cost:10.1%} "
            f"{peak / 2**20:10.1f} {needed / 2**20:10.1f}"
        )

    for name, each in named.items():
        line(name, each)
        passed &= abs(measured[each] - recompute_cost(CFG, train, each)) <= furthest
    for n_bytes, each in bought.items():
        fitting = [name for name, other in named.items() if peaks[other] <= n_bytes]
        best = min(fitting, key=lambda name: measured[named[name]])
        line(f"<= {n_bytes / 2**20:.1f}", each)
        print(
            f"{'':12} {', '.join(each)}; the fastest by name that fits: {best!r}, "
            f"{measured[named[best]]:.1%}"
        )
        passed &= measured[each] <= measured[named[best]] + SLOWER
    return passed


def main() -> None:
    torch.set_num_threads(1)
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    results = [compare(precision, n_rounds) for precision in ("fp32", "bf16")]
    print("every bound kept" if all(results) else "a bound was missed")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
