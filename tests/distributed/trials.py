"""What ranks do in the tests of layouts: train each case, and say how far it came."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from labkit.config import Layout
from labkit.parallel.group import join, leave
from labkit.parallel.mesh import Mesh
from labkit.parallel.model import parallelize
from tests.distributed import serial


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A case, and how it is parallelized."""

    layout: Layout
    case: serial.Case
    n_micro_batches: int = 1
    replicate: int = 1
    options: Mapping[str, object] = field(default_factory=dict)
    """Of `parallelize`."""

    @property
    def is_bf16(self) -> bool:
        return self.options.get("mixed") == torch.bfloat16


@dataclass
class Outcome:
    """What one rank saw of a trial."""

    figures: list[tuple[object, ...]]
    """Losses, norm and load of each step, which all ranks must agree on."""

    comparison: serial.Comparison | serial.Rounding | None
    """With one process; made by the first rank."""


def trial(
    seed: int,
    layout: dict[str, int],
    *,
    n: int = 1,
    replicate: int = 1,
    case: dict[str, int] | None = None,
    **options: object,
) -> Trial:
    """Return a trial of a drawn case, with `n` micro-batches."""
    drawn = serial.drawn(seed, **(case or {}))
    if options.get("mixed") == torch.bfloat16:
        drawn = serial.for_bf16(drawn)
    return Trial(
        layout=Layout(**layout),
        case=drawn,
        n_micro_batches=n,
        replicate=replicate,
        options=options,
    )


def outcomes(trials: Mapping[str, Trial]) -> dict[str, Outcome]:
    """Return what this rank saw of all trials."""
    seen = {}
    for name, each in trials.items():
        _begin_anew(name)
        try:
            seen[name] = outcome(each)
        except BaseException as error:
            error.add_note(f"in the trial {name!r}")
            raise
    return seen


def _begin_anew(name: str) -> None:
    """Leave all groups and join a first one: a thousand threads of theirs take long."""
    rank, world = dist.get_rank(), dist.get_world_size()
    leave()
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, wait_for_workers=False)
    join(dist.PrefixStore(name, store), rank=rank, world=world)


def outcome(trial: Trial) -> Outcome:
    """Train as the trial says; compare on the first rank."""
    mesh = Mesh(trial.layout, replicate=trial.replicate)
    run = parallelize(trial.case.model(), mesh, **trial.options)
    ours = serial.parallel_steps(
        trial.case,
        run,
        index=mesh.dp.get_local_rank(),
        n=trial.layout.dp,
        n_micro_batches=trial.n_micro_batches,
    )
    figures = [
        (*step.parts.values(), step.norm, *step.load.flatten().tolist())
        for step in ours
    ]
    comparison = None
    if dist.get_rank() == 0 and trial.is_bf16:
        comparison = serial.rounding(trial.case, ours)
    elif dist.get_rank() == 0:
        comparison = serial.compare(ours, serial.serial_steps(trial.case))
    return Outcome(figures, comparison)


def check(ranks: list[dict[str, Outcome]], name: str, *, rounded: float) -> None:
    """Assert that a trial came out as in one process.

    Args:
        ranks: what each rank saw.
        name: of the trial.
        rounded: largest distance of the whole gradient, in BF16.
    """
    first = ranks[0][name]
    assert all(rank[name].figures == first.figures for rank in ranks)
    seen = first.comparison
    if isinstance(seen, serial.Rounding):
        assert seen.loss < 1e-3, seen
        assert seen.gradient < rounded, seen
        assert seen.ours < 1.25 * seen.theirs, seen
        return
    assert seen.n_loads_apart == 0, seen
    assert seen.loss < 1e-5, seen
    assert seen.norm < 1e-5, seen
    assert seen.gradient < 1e-5, seen
    assert seen.parameter < 1e-5, seen
