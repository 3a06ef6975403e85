"""Training step of labkit beside transformers: tokens/s and peak memory, as ratios.

Same weights, same batch, one process, alternating every few steps; medians. A step is
forward, loss, backward and a fused AdamW update. BF16 means autocast over FP32 weights
in both.
Run with `make bench`, or `python tests/benchmarks/bench_training.py`.
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from reference import gemm_peak, medians, paired_models
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

SHAPES = ((8, 256), (1, 2048))

EXPERT_IMPLEMENTATIONS = ("eager", "grouped_mm")
"""transformers' ways to compute experts, but for `batched_mm`: it copies the weights
of each token's experts, 3.2 GB a layer here, and is meant for decoding."""

FLOORS = {
    ("fp32", (8, 256)): 1.2,
    ("fp32", (1, 2048)): 2.3,
    ("bf16", (8, 256)): 1.8,
    ("bf16", (1, 2048)): 3.4,
}
"""Least tokens/s of labkit over transformers' best."""

N_REPEATS = 3
"""Steps timed in a row, after one that is not."""

PEAK_CEILING = 0.5
"""Most peak memory of a 1 x 2048 step, over transformers' best."""


def our_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return model.loss(tokens, targets).total


def their_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def training_step(
    model: nn.Module, loss: Callable, shape: tuple[int, int], precision: str
) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (shape[0], shape[1] + 1), generator=generator)
    tokens, targets = text[:, :-1], text[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast("cpu", enabled=precision == "bf16"):
            value = loss(model, tokens, targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak_bytes(step: Callable[[], None]) -> int:
    """Return the most bytes the allocator held during a step above its start."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    live = most = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def compare(precision: str, shape: tuple[int, int], n_rounds: int) -> bool:
    ours, theirs = paired_models()
    runs = {"labkit": training_step(ours, our_loss, shape, precision)}
    base = training_step(theirs, their_loss, shape, precision)
    for kind in EXPERT_IMPLEMENTATIONS:

        def run(kind: str = kind) -> None:
            theirs.set_experts_implementation(kind)
            base()

        runs[kind] = run
    times = medians(runs, n_rounds, n_repeats=N_REPEATS)
    best = min(EXPERT_IMPLEMENTATIONS, key=times.get)
    ratio = times[best] / times["labkit"]
    n_tokens = shape[0] * shape[1]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    flops = ours.cfg.flops_per_token(shape[1]) * n_tokens
    share = flops / times["labkit"] / gemm_peak(dtype)
    floor = FLOORS[precision, shape]
    others = ", ".join(f"{k} {times[k] * 1e3:.0f}" for k in EXPERT_IMPLEMENTATIONS)
    print(
        f"{precision} {shape[0]}x{shape[1]}: labkit {times['labkit'] * 1e3:.0f} ms "
        f"({n_tokens / times['labkit']:,.0f} tokens/s, {share:.0%} of the measured "
        f"GEMM peak); transformers {others} ms; ratio {ratio:.2f} (floor {floor})",
        flush=True,
    )
    passed = ratio >= floor
    if shape == (1, 2048):
        ours_peak = peak_bytes(runs["labkit"])
        theirs_peak = min(peak_bytes(runs[kind]) for kind in EXPERT_IMPLEMENTATIONS)
        share = ours_peak / theirs_peak
        print(
            f"  peak memory {ours_peak / 2**20:.0f} MiB against "
            f"{theirs_peak / 2**20:.0f} MiB: {share:.2f} (ceiling {PEAK_CEILING})",
            flush=True,
        )
        passed = passed and share <= PEAK_CEILING
    return passed


def main() -> None:
    torch.set_num_threads(2)
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    results = [compare(p, s, n_rounds) for p in ("fp32", "bf16") for s in SHAPES]
    print("every floor reached" if all(results) else "a floor was missed")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
