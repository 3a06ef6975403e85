"""A precision scheduler at work: it is shown each step, and what it decides is done.

The scheduler is a pure function of signals; here they are gathered, levels are set, and
earlier states are kept to go back to. Such a scheduler is a proposal of articles:
DeepSeek-V3's own policy is static, and its report knows of no rollback.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from labkit.monitor import StepMetrics
from labkit.precision.limits import Limits
from labkit.precision.scheduler import PrecisionScheduler
from labkit.precision.signals import GEMMS, GemmSignal, SignalProbe, StepSignals
from labkit.training.checkpoint import Checkpoint, gather_tensors
from labkit.training.checkpoint_check import Tensors, check_tensors
from labkit.training.decisions import DecisionLog, Rollback, from_values
from labkit.training.fp8 import Fp8
from labkit.training.ranks import Ranks
from labkit.training.saved_run import SavedRun
from labkit.training.snapshots import Snapshot, SnapshotRing

PREFIX = "snapshot"
"""Of the tensors of snapshots in a checkpoint."""

Gemms = Mapping[str, Mapping[str, GemmSignal]]


class PrecisionWatch:
    """Gathers a scheduler's signals and obeys it, on every rank alike.

    Without a scheduler there is nothing to do, and nothing is done.

    Args:
        fp8: the model, and the scheduler if there is one.
        ranks: all of them see the worst of what any one saw.
    """

    def __init__(self, fp8: Fp8, ranks: Ranks) -> None:
        self.fp8, self.ranks = fp8, ranks
        self.scheduler = fp8.scheduler
        self.ring = SnapshotRing()
        self.log = DecisionLog()
        self._gemms: Gemms = {}

    @property
    def attempt(self) -> int:
        """How many times the run went back."""
        return len(self.log.rollbacks)

    def keep(self, progress: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Take a snapshot before a step, if one is due."""
        if self.scheduler is None or not self.ring.is_due(progress["n_steps_done"]):
            return
        tensors = gather_tensors(self.fp8.model, optimizer)
        statistics = self.scheduler.statistics
        self.ring.take(
            Snapshot(progress=progress, tensors=tensors, statistics=statistics)
        )

    def held_on(self, device: torch.device) -> int:
        """Return the most bytes that snapshots take of a device's memory."""
        return self.ring.most_bytes if device.type == "cpu" else 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Gather signals of what is quantized meanwhile."""
        if self.scheduler is None:
            yield
            return
        with SignalProbe(self.fp8.model) as probe:
            yield
            self._gemms = probe.read()

    def judge(self, metrics: StepMetrics) -> Snapshot | None:
        """Show a step to the scheduler and set its levels; return where to go back to.

        None goes on.
        """
        if self.scheduler is None:
            return None
        signals = StepSignals(
            step=metrics.step,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            gemms=worst_of(self._gemms, tuple(self.scheduler.levels), self.ranks),
        )
        verdict = self.scheduler.observe(signals)
        if verdict.decisions:
            self.fp8.apply()
        if not verdict.roll_back:
            self.log.entries += verdict.decisions
            return None
        since = verdict.since or metrics.step
        snapshot = self.ring.before(since)
        self.scheduler.rewind(snapshot.statistics)
        rollback = Rollback(
            step=metrics.step,
            since=since,
            back_to=snapshot.n_steps_done,
            cause=verdict.cause or "",
        )
        self.log.entries += (*verdict.decisions, rollback)
        return snapshot

    def to_values(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps of it, but for tensors."""
        if self.scheduler is None:
            return None
        return {
            "hardware": self.scheduler.hardware,
            "limits": asdict(self.scheduler.limits),
            "state": self.scheduler.state_dict(),
            "log": self.log.to_values(),
            "snapshots": [
                {"progress": snapshot.progress, "statistics": snapshot.statistics}
                for snapshot in self.ring.snapshots
            ],
        }

    def to_tensors(self) -> Tensors:
        """Return the tensors of all snapshots, by name."""
        return {
            f"{PREFIX}.{index}.{name}": tensor
            for index, snapshot in enumerate(self.ring.snapshots)
            for name, tensor in snapshot.tensors.items()
        }

    def load(self, saved: Checkpoint) -> Tensors:
        """Go on from a checkpoint; return its tensors that are not of snapshots.

        The scheduler itself has its state already, by `saved_scheduler`.

        Raises:
            ValueError: snapshots are not whole.
        """
        own, later = _split(saved.tensors)
        values = saved.values.get("scheduler") or {"snapshots": (), "log": ()}
        places = [f"{PREFIX}.{index}." for index in range(len(values["snapshots"]))]
        check_tensors(later, {p + name: own[name] for p in places for name in own})
        self.log = DecisionLog(map(from_values, values["log"]))
        self.ring.snapshots = [
            Snapshot(tensors={name: later[place + name] for name in own}, **kept)
            for place, kept in zip(places, values["snapshots"], strict=True)
        ]
        return own


def _split(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return a checkpoint's own tensors, and those of its snapshots."""
    later = {n: t for n, t in tensors.items() if n.startswith(f"{PREFIX}.")}
    return {n: t for n, t in tensors.items() if n not in later}, later


def saved_scheduler(saved: SavedRun) -> PrecisionScheduler | None:
    """Return the scheduler of a run with its state, if the run has one."""
    values = saved.checkpoint.values.get("scheduler")
    if values is None:
        return None
    scheduler = PrecisionScheduler(
        saved.cfg,
        aim=saved.train.fp8_policy,
        hardware=values["hardware"],
        limits=Limits(**values["limits"]),
    )
    scheduler.load_state_dict(values["state"])
    return scheduler


def worst_of(gemms: Gemms, modules: tuple[str, ...], ranks: Ranks) -> Gemms:
    """Return the signals of all ranks in one: the worst of each, and sums of counts.

    Args:
        gemms: what this rank saw. Ranks may have seen other modules, as experts
            without a token.
        modules: all that there are, in the same order on every rank.
        ranks: who takes part.
    """
    if ranks.world == 1:
        return gemms
    keys = [(module, gemm) for module in modules for gemm in GEMMS]
    worst = torch.full((len(keys), 2), -math.inf, dtype=torch.float64)
    counts = torch.zeros((len(keys), 2), dtype=torch.int64)
    for row, (module, gemm) in enumerate(keys):
        signal = gemms.get(module, {}).get(gemm)
        if signal is not None:
            worst[row, 0], worst[row, 1] = signal.underflow, -signal.sqnr_db
            counts[row, 0], counts[row, 1] = 1, signal.n_nonfinite_tiles
    worst, counts = ranks.max(worst).tolist(), ranks.sum(counts).tolist()
    found: dict[str, dict[str, GemmSignal]] = {}
    for (module, gemm), (underflow, noise), (n_seen, n_bad) in zip(
        keys, worst, counts, strict=True
    ):
        if n_seen:
            signal = GemmSignal(underflow, -noise, n_bad)
            found.setdefault(module, {})[gemm] = signal
    return found
