"""What the precision scheduler catches, and that it leaves healthy runs alone.

"tiny" learns the standard library's bytes with everything in FP8 that a policy says,
and meets a fault of `labkit.precision.faults`: it must be seen within 5 steps, the run
taken back, and the mean loss of the last steps be that of the healthy run with the same
seed, to 1 %. Products in FP8 are emulated on a CPU.

With `--healthy N` it is N runs of 500 steps without a fault: none may be rolled back,
and no module taken back. Run with `make bench`, or
`python tests/benchmarks/bench_scheduler.py [--faults NAME ...] [--healthy N]`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from labkit.config import PRESETS, TrainConfig
from labkit.model import Transformer
from labkit.monitor import StepMetrics
from labkit.precision.faults import Fault, inject, reckless_plan
from labkit.precision.levels import LEVELS
from labkit.precision.scheduler import PrecisionScheduler
from labkit.training import Corpus, Trainer, corpus
from labkit.training.recipes import TINY

WINDOW = 25
"""Last steps whose losses are averaged."""

MOST_STEPS = 5
"""That may pass from the first faulty step to the rollback."""

LIMIT = 0.01
"""Most by which the last losses may differ from the healthy run's."""

FAULT_STEPS, HEALTHY_STEPS = 150, 500
"""Of each run."""

FIRST = 35
"""Steps, of one micro-batch each, before a fault."""


class Case(NamedTuple):
    """What befalls which module."""

    kind: str
    module: str

    def faults(self, model: Transformer, names: Iterable[str]) -> tuple[Fault, ...]:
        """Return the faults of a model with these modules in FP8."""
        if self.kind == "floor":
            return reckless_plan(model, names, first=FIRST)
        last = FIRST if self.kind == "inf" else None
        return (
            Fault(
                kind=self.kind,
                module=self.module,
                first=FIRST,
                last=last,
                only_in_fp8=last is None,
            ),
        )


CASES = MappingProxyType(
    {
        "inf": Case("inf", "layers.1.attn.wo"),
        "outlier": Case("outlier", "layers.2.attn.wq_a"),
        "imbalance": Case("imbalance", "layers.1.ffn.experts"),
        "bold plan": Case("floor", "all in FP8"),
    }
)
"""The first is there for one step; the others for as long as a module is in FP8."""


def trainer_of(text: Corpus, recipe: TrainConfig, *, start: str) -> Trainer:
    generator = torch.Generator().manual_seed(recipe.seed)
    model = Transformer(PRESETS["tiny"], generator=generator)
    train = replace(recipe, precision="fp8")
    scheduler = PrecisionScheduler(model.cfg, start=start, aim=train.fp8_policy)
    return Trainer(model, train, text, scheduler=scheduler)


def last_loss(records: list[StepMetrics]) -> float:
    return statistics.fmean(record.loss_main for record in records[-WINDOW:])


def n_taken_back(trainer: Trainer) -> int:
    """Return how many decisions made a module safer."""
    return sum(
        LEVELS.index(each.after) > LEVELS.index(each.before)
        for each in trainer.decisions
    )


def run_with(
    text: Corpus, recipe: TrainConfig, case: Case | None = None
) -> tuple[float, Trainer]:
    """Train, all in FP8 that the policy says; return the last loss and the trainer."""
    trainer = trainer_of(text, recipe, start=recipe.fp8_policy)
    names = trainer.watch.scheduler.levels
    faults = case.faults(trainer.model, names) if case else ()
    with inject(trainer.model, *faults):
        return last_loss(trainer.run(progress=False)), trainer


def report_fault(name: str, case: Case, trainer: Trainer, gap: float) -> bool:
    """Print a row of the table; return whether the bar is reached."""
    rollbacks = trainer.rollbacks
    n_steps = rollbacks[0].step - (FIRST + 1) if rollbacks else None
    seen = "never" if n_steps is None else f"after {n_steps}"
    passed = n_steps is not None and 0 <= n_steps <= MOST_STEPS and abs(gap) <= LIMIT
    cause = rollbacks[0].cause if rollbacks else "-"
    print(
        f"{name:<10} {case.module:<22} {seen:>8} {len(rollbacks):>9} "
        f"{n_taken_back(trainer):>10} {gap:>+8.2%}  {'yes' if passed else 'NO':<4} "
        f"{cause}",
        flush=True,
    )
    return passed


def faults(text: Corpus, names: list[str], recipe: TrainConfig) -> bool:
    healthy, trainer = run_with(text, recipe)
    results = [is_undisturbed(f"seed {recipe.seed}, no fault", trainer)]
    print(
        f"faults from step {FIRST + 1} of {recipe.n_steps} on, and the gap of the last "
        f"{WINDOW} steps' loss to the {healthy:.4f} of the run without\n"
        f"{'fault':<10} {'module':<22} {'seen':>8} {'rollbacks':>9} {'taken back':>10} "
        f"{'gap':>8}  {'bar':<4} cause",
        flush=True,
    )
    for name in names:
        loss, trainer = run_with(text, recipe, CASES[name])
        gap = loss / healthy - 1
        results.append(report_fault(name, CASES[name], trainer, gap))
    return all(results)


def is_undisturbed(name: str, trainer: Trainer) -> bool:
    """Print what the scheduler did in a healthy run; return whether it let it be."""
    n_rollbacks, n_back = len(trainer.rollbacks), n_taken_back(trainer)
    n_bolder = len(trainer.decisions) - n_back
    causes = "".join(f"; step {each.step}: {each.cause}" for each in trainer.rollbacks)
    print(
        f"{name}: {n_rollbacks} rollbacks, {n_back} taken back, {n_bolder} made "
        f"bolder; {trainer.fp8}{causes}",
        flush=True,
    )
    return not (n_rollbacks or n_back)


def healthy_runs(text: Corpus, seeds: range, recipe: TrainConfig) -> bool:
    results = []
    for seed in seeds:
        trainer = trainer_of(text, replace(recipe, seed=seed), start="conservative")
        start = time.process_time()
        loss = last_loss(trainer.run(progress=False))
        seconds = time.process_time() - start
        name = (
            f"seed {seed}, {recipe.n_steps} steps, {seconds:.0f} CPU s, loss {loss:.4f}"
        )
        results.append(is_undisturbed(name, trainer))
    return all(results)


def main() -> None:
    names = list(CASES)
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", nargs="*", choices=names, default=names)
    parser.add_argument("--healthy", metavar="N", type=int, default=0)
    parser.add_argument("--steps", metavar="N", type=int, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = corpus.standard_library(seq_len=TINY.seq_len)
    print(text, flush=True)
    n_steps = options.steps or (HEALTHY_STEPS if options.healthy else FAULT_STEPS)
    recipe = replace(TINY, n_steps=n_steps, seed=options.seed)
    if options.healthy:
        seeds = range(options.seed, options.seed + options.healthy)
        passed = healthy_runs(text, seeds, recipe)
    else:
        passed = faults(text, options.faults, recipe)
    print("every bar reached" if passed else "a bar was missed")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
