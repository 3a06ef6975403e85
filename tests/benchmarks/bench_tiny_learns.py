"""How fast "tiny" learns the standard library's bytes: validation nats by seconds.

Three seeds of weights and data order, two threads, the recipe of the preset. Seconds
are of training; evaluations are left out. Run with `make bench`, or
`python tests/benchmarks/bench_tiny_learns.py [--busy]`.

With `--busy`, for a machine that other programs use, it takes one thread and counts
the CPU seconds of this process: one core's worth in place of two.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from labkit.config import PRESETS
from labkit.model import Transformer
from labkit.training import Corpus, Trainer, corpus
from labkit.training.recipes import TINY

MARKS = (0, 10, 20, 40, 60)
"""Seconds of training at which the loss is read."""

CEILING = 2.6
"""Most nats per byte after the last mark, or after the recipe if that ends first."""

START = 5.4
"""Least nats before training: a uniform guess among 256 bytes costs 5.545."""


Clock = Callable[[], float]


def learning_curve(
    text: Corpus, seed: int, clock: Clock
) -> tuple[list[float], Trainer, float]:
    """Return the nats at each mark, the trainer and the seconds it took."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(PRESETS["tiny"], generator=generator)
    trainer = Trainer(model, replace(TINY, seed=seed), text)
    nats, seconds = [trainer.evaluate().nats], 0.0
    for mark in MARKS[1:]:
        while seconds < mark and trainer.n_steps_done < TINY.n_steps:
            start = clock()
            trainer.step()
            seconds += clock() - start
        nats.append(trainer.evaluate().nats)
    return nats, trainer, seconds


def report(text: Corpus, seed: int, clock: Clock) -> bool:
    nats, trainer, seconds = learning_curve(text, seed, clock)
    columns = "  ".join(f"{value:5.3f}" for value in nats)
    n_tokens = trainer.n_tokens_seen
    print(
        f"seed {seed}:  {columns}   {trainer.n_steps_done} of {TINY.n_steps} steps, "
        f"{n_tokens:,} tokens in {seconds:.0f} s, {n_tokens / seconds:,.0f} tokens/s",
        flush=True,
    )
    return nats[0] > START and nats[-1] < CEILING


def main() -> None:
    is_busy = "--busy" in sys.argv[1:]
    torch.set_num_threads(1 if is_busy else 2)
    clock = time.process_time if is_busy else time.perf_counter
    text = corpus.standard_library()
    print(f"{text}\n{TINY}")
    unit = "CPU s" if is_busy else "s"
    print("validation nats at " + ", ".join(f"{mark} {unit}" for mark in MARKS))
    results = [report(text, seed, clock) for seed in range(3)]
    print(f"below {CEILING} nats" if all(results) else "the bar was missed")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
