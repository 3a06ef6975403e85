"""Lines that tell how a run goes on."""

from collections.abc import Callable

from labkit.model.checkpoint_files import named
from labkit.monitor import StepMetrics
from labkit.precision.scheduler import Decision
from labkit.training.decisions import Entry, Rollback


def line_printer(interval: int, n_steps: int) -> Callable[[StepMetrics], None]:
    """Return what prints the first record, the last, and each at the interval."""

    def show(metrics: StepMetrics) -> None:
        is_edge = metrics.step in (1, n_steps)
        if is_edge or metrics.step % interval == 0 or metrics.is_skipped:
            print(metrics, flush=True)

    return show


def print_decisions(entries: tuple[Entry, ...]) -> None:
    """Print what a scheduler decided after a step: alike decisions are one line."""
    alike: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry, Decision):
            words = f"step {entry.step:>5}  {entry.before} to {entry.after} "
            why = f"({entry.signal}: {entry.value:.3g})"
            alike.setdefault(words + why, []).append(entry.module)
    for words, modules in alike.items():
        text = f"{words}, {len(modules)} layer(s): {named(modules, limit=3)}"
        print(text, flush=True)
    for entry in entries:
        if isinstance(entry, Rollback):
            print(entry, flush=True)
