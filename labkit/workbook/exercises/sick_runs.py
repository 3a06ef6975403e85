"""What the exercises of notebook 04 run: a model of 16 channels, and a watch over it.

An answer is one step of a run, or the answer to one prompt. Each measure makes a fresh
run, repeats the step and looks at what became of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from labkit.config import MLAConfig, ModelConfig
from labkit.memory import AllocationCount, LeakWatch
from labkit.model import LatentCache, Transformer
from labkit.training.windows import Batch
from labkit.workbook.clinic import TrustingCache

N_STEPS = 10
N_MICRO_BATCHES = 4
ROOM = 16
"""Tokens that the cache of a run has room for: a prompt of 12 and an answer of 4."""

CFG = ModelConfig(
    vocab_size=64,
    dim=16,
    n_layers=1,
    n_dense_layers=1,
    inter_dim=32,
    attention=MLAConfig(
        n_heads=2,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    max_seq_len=512,
    init_std=0.3,
)

Step = Callable[..., Any]
"""A learner's function of a run and what the step is given."""


@dataclass(kw_only=True)
class Run:
    """What a step finds: a model and its optimizer, and lists to keep things in."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    held_out: Batch
    cache: LatentCache
    history: list[Any] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)


def new_run() -> Run:
    """Return a run that has not begun."""
    model = Transformer(CFG, generator=torch.Generator().manual_seed(0))
    return Run(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        held_out=batch(99),
        cache=TrustingCache(CFG, 1, ROOM, dtype=torch.float32),
    )


def batch(number: int) -> Batch:
    """Return two sequences of noise, always the same for a number."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(CFG.vocab_size, (2, 13), generator=generator)
    return Batch(rows[:, :-1], rows[:, 1:])


def micro_batches(number: int, count: int = N_MICRO_BATCHES) -> list[Batch]:
    """Return the batches that make up one step."""
    return [batch(count * number + i) for i in range(count)]


def growth(step: Step) -> int:
    """Return the bytes that a step adds to what lives, the first two left out."""
    watch = _watch(new_run(), step)
    watch.close()
    return (watch.live[-1] - watch.live[1]) // (N_STEPS - 2)


def _watch(run: Run, step: Step) -> LeakWatch:
    with LeakWatch(run.model) as watch:
        for number in range(N_STEPS):
            step(run, batch(number))
            watch.end_step()
    return watch


def n_hooks(step: Step) -> int:
    """Return the hooks on the last norm after ten steps."""
    return len(finished(step).model.norm._forward_hooks)


def what_grows(step: Step) -> str:
    """Return who holds most of what ten steps leave behind, or "nothing".

    A check does not ask: the answer takes a second or so.
    """
    run = new_run()
    watch = _watch(run, step)
    leaks = watch.report().leaks
    watch.close()
    for leak in leaks:
        return f"{leak.holder}, {leak.bytes_per_step:,} bytes a step"
    return "nothing"


def finished(step: Step, given: Callable[[int], object] = batch) -> Run:
    """Return a run after ten steps."""
    run = new_run()
    for number in range(N_STEPS):
        step(run, given(number))
    return run


def n_noted(step: Step) -> int:
    """Return how many numbers ten steps have noted."""
    return len(finished(step).history)


def noted_drift(step: Step, reference: Step) -> float:
    """Return how far the numbers that ten steps note are from those of another way."""
    noted, right = (
        [torch.as_tensor(number).detach().item() for number in finished(each).history]
        for each in (step, reference)
    )
    return max((abs(a - b) for a, b in zip(noted, right, strict=False)), default=0.0)


def drift(step: Step, reference: Step, given: Callable[[int], object] = batch) -> float:
    """Return how far the last of ten losses is from that of another way to train."""
    run, other = new_run(), new_run()
    for number in range(N_STEPS):
        loss, right = step(run, given(number)), reference(other, given(number))
    return abs(float(loss) - float(right))


def n_true_reports(step: Step, reference: Step) -> int:
    """Return how many reports read after ten steps as they should."""
    read = [report() for report in finished(step).reports]
    right = [report() for report in finished(reference).reports]
    return sum(a == b for a, b in zip(read, right, strict=False))


def peak_growth(step: Step) -> float:
    """Return the peak of a step with four micro-batches by that of one with one."""
    return _peak(step, N_MICRO_BATCHES) / _peak(step, 1)


def _peak(step: Step, count: int) -> int:
    run = new_run()
    step(run, micro_batches(0, count))
    with AllocationCount() as allocations:
        step(run, micro_batches(1, count))
    allocations.close()
    return allocations.peak_bytes


def prompt(number: int) -> Int[Tensor, "1 s"]:
    """Return twelve tokens."""
    return batch(number).tokens[:1]


def room_after(answer: Step) -> int:
    """Return for how many tokens the cache has room after ten prompts."""
    return finished(answer, prompt).cache.max_seq


def n_right_answers(answer: Step) -> int:
    """Return how many of ten answers are those of the model without a cache."""
    run = new_run()
    given = [prompt(number) for number in range(N_STEPS)]
    answers = [list(answer(run, tokens)) for tokens in given]
    right = [uncached(run.model, tokens) for tokens in given]
    return sum(a == b for a, b in zip(answers, right, strict=True))


def is_reused(answer: Step) -> str:
    """Return whether a run ends with its first cache, and wrote into it."""
    run = new_run()
    first = run.cache
    for number in range(N_STEPS):
        answer(run, prompt(number))
    if run.cache is not first:
        return "another"
    return "the same" if first.entries.any() else "not used"


@torch.inference_mode()
def uncached(model: Transformer, tokens: Int[Tensor, "1 s"]) -> list[int]:
    """Return the four tokens that follow a prompt, all computed anew for each."""
    n_given = tokens.shape[1]
    for _ in range(ROOM - n_given):
        following = model(tokens)[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens[0, n_given:].tolist()
