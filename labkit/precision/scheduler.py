"""A precision scheduler: it decides, watches, and takes back.

It starts with the modules that a conservative policy has in FP8 and grows bolder, one
group of modules at a time, up to another policy. It sees signals of each step, and says
what is to become of which module, and whether the step is to be undone; it changes no
model itself. Levels are those of `labkit.precision.levels`.

Such a scheduler is a proposal of articles. DeepSeek-V3's own policy is static, and its
report knows of no rollback.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.config import ModelConfig
from labkit.precision.levels import bolder, modules_in_fp8, require_levels, safer
from labkit.precision.limits import (
    Finding,
    Limits,
    findings,
    underflow_key,
    watched,
)
from labkit.precision.order import groups_by_boldness
from labkit.precision.policies import PrecisionPolicy, policy_of
from labkit.precision.running import Running
from labkit.precision.signals import StepSignals

RUNNING = {"loss": 0.02, "grad_norm": 0.05}
"""What has running statistics, the norm as its logarithm, and the standard deviation
below which a spread is not believed."""

COUNTS = ("n_observed", "n_healthy", "latest_at", "trouble_step", "n_futile")
"""Names of whole numbers in a scheduler's state."""

WORDS = {
    "nonfinite": "{value:.0f} tiles of {gemm} are not finite",
    "underflow": "{value:.0%} of an operand of {gemm} became zero",
    "sqnr": "{gemm} keeps {value:.1f} dB of signal over noise",
    "loss": "the loss",
    "grad_norm": "the gradient's norm",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A module's change of level, and why."""

    step: int
    """Of the signals that led to it."""

    module: str

    signal: str
    """What was out of its limits, as in "wgrad underflow" or "loss"; "healthy" of a
    module that becomes bolder."""

    value: float
    """Of that signal; of "healthy" the steps without a doubt."""

    before: str
    """One of `LEVELS`."""

    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is to be done after a step."""

    decisions: tuple[Decision, ...] = ()

    roll_back: bool = False
    """Whether the run is to go back to what it was before `since`."""

    since: int | None = None
    """First step of the trouble, whose update must not stay; None without trouble."""

    cause: str | None = None
    """The trouble in words; None without."""


class PrecisionScheduler:
    """A state machine over `StepSignals`; equal signals give equal decisions.

    After `Limits.n_healthy` healthy steps the next group of `groups_by_boldness` comes
    one level closer to "fp8"; a group comes all the way before the next begins. A
    signal out of its limits for `Limits.patience` steps, or one that is not finite,
    takes guilty modules back and calls for a rollback.

    Guilty are modules whose own products are out of limits: they become "high", or
    "fp8-high-wgrad" where only the product for the weight's gradient is. Of tiles that
    are not finite only the first module of the forward (of the backward, if none) is:
    others were given them. Where only the loss or the norm is out of limits, it is the
    group made bolder last, if that was within as many steps as it takes to go on;
    otherwise all that is in FP8.

    A module that was taken back cools down, longer each time, and at last stays "high".

    Args:
        cfg: the model.
        start: policy of the first step, as far as `aim` is as bold.
        aim: policy that is the boldest it may come to.
        hardware: whose plans hold, as in `plan`.
        limits: where a healthy run ends.

    >>> from labkit.config import PRESETS
    >>> scheduler = PrecisionScheduler(PRESETS["v3-671b"])
    >>> scheduler.levels["layers.9.attn.wq_a"], scheduler.levels["layers.9.ffn.experts"]
    ('fp8', 'high')
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        start: str | PrecisionPolicy = "conservative",
        aim: str | PrecisionPolicy = "deepseek-v3",
        hardware: str = "cpu",
        limits: Limits | None = None,
    ) -> None:
        self.start, self.aim = policy_of(start), policy_of(aim)
        self.hardware = hardware
        self.limits = limits or Limits()
        at_start = set(modules_in_fp8(cfg, self.start, hardware))
        names = modules_in_fp8(cfg, self.aim, hardware)
        self._levels = {name: "fp8" if name in at_start else "high" for name in names}
        self._groups = groups_by_boldness(names, cfg.n_layers)
        self._n_observed = 0
        self._n_healthy = 0
        self._flips = dict.fromkeys(names, 0)
        self._cool_until = dict.fromkeys(names, 0)
        """Observed steps before which a module grows no bolder."""
        self._latest: list[str] = []
        """Modules made bolder last, until an alarm or the next ones."""
        self._latest_at = 0
        self._in_a_row: dict[str, int] = {}
        """Steps that signals are out of their limits, by `Finding.key`."""
        self._trouble_step = 0
        self._n_futile = 0
        """Rollbacks to before `_trouble_step` without a module made safer."""
        self._running = {kind: self._new_running(kind) for kind in RUNNING}
        self._usual: dict[str, float] = {}
        """Running means of underflow, by `underflow_key`."""

    def _new_running(self, kind: str) -> Running:
        return Running(span=self.limits.span, least=RUNNING[kind])

    @property
    def levels(self) -> dict[str, str]:
        """Level of each module that `aim` has in FP8, in the order of the forward."""
        return dict(self._levels)

    @property
    def pinned(self) -> tuple[str, ...]:
        """Modules that were taken back so often that they stay "high"."""
        most = self.limits.max_flips
        return tuple(name for name, n in self._flips.items() if n >= most)

    @property
    def statistics(self) -> dict[str, dict[str, float]]:
        """What a snapshot of the run keeps for `rewind`, ready for JSON."""
        running = {kind: each.state_dict() for kind, each in self._running.items()}
        return running | {"underflow": dict(self._usual)}

    def observe(self, signals: StepSignals) -> Verdict:
        """Take in a step, change levels, and say what changed and what is to be done.

        Whoever acts sets the levels, and after a verdict to roll back calls `rewind`.
        """
        self._n_observed += 1
        near = [
            *findings(signals, self._levels, self.limits, self._usual),
            *self._findings_of_run(signals),
        ]
        out = [finding for finding in near if finding.share >= 1]
        self._in_a_row = {f.key: self._in_a_row.get(f.key, 0) + 1 for f in out}
        alarms = [finding for finding in out if self._is_alarm(finding)]
        if alarms:
            return self._take_back(signals.step, alarms)
        if signals.step > self._trouble_step:
            self._n_futile = 0
        self._remember(signals)
        self._n_healthy = 0 if near else self._n_healthy + 1
        if self._n_healthy >= self.limits.n_healthy and self._is_warm:
            return Verdict(decisions=self._grow_bolder(signals.step))
        return Verdict()

    @property
    def _is_warm(self) -> bool:
        return self._running["loss"].n >= self.limits.n_warm_up

    def _findings_of_run(self, signals: StepSignals) -> Iterator[Finding]:
        """Yield what loss and norm show that is near or out of limits."""
        for kind, value in _of_run(signals).items():
            if not math.isfinite(value):
                yield Finding(None, None, kind, value, math.inf)
            elif self._is_warm:
                z = self._running[kind].z(value)
                if z >= self.limits.calm * self.limits.most_z:
                    yield Finding(None, None, kind, z, z / self.limits.most_z)

    def _is_alarm(self, finding: Finding) -> bool:
        n = self._in_a_row[finding.key]
        return math.isinf(finding.share) or n >= self.limits.patience

    def _remember(self, signals: StepSignals) -> None:
        for kind, value in _of_run(signals).items():
            # An outlier counts as one that is barely allowed.
            most = self.limits.most_z if self._is_warm else math.inf
            self._running[kind].add(value, most=most)
        for module, gemm, signal in watched(signals, self._levels):
            key = underflow_key(module, gemm)
            mean = self._usual.setdefault(key, signal.underflow)
            rise = min(signal.underflow - mean, self.limits.most_rise)
            self._usual[key] = mean + rise / self.limits.span

    def _take_back(self, step: int, alarms: list[Finding]) -> Verdict:
        """Make guilty modules safer."""
        since = step + 1 - max(self._in_a_row[alarm.key] for alarm in alarms)
        targets = self._targets(alarms)
        guilty = [alarm for alarm, _ in targets.values()] or alarms
        decisions = tuple(
            self._flip(step, module, *target) for module, target in targets.items()
        )
        self._n_futile = 0 if decisions else self._n_futile + 1
        self._trouble_step = max(self._trouble_step, step)
        self._n_healthy, self._in_a_row, self._latest = 0, {}, []
        is_hopeless = self._n_futile > self.limits.max_rollbacks
        if is_hopeless:  # what is normal now must be learnt anew
            self._running = {kind: self._new_running(kind) for kind in RUNNING}
        return Verdict(
            decisions=decisions,
            roll_back=not is_hopeless,
            since=since,
            cause=_in_words(max(guilty, key=lambda alarm: alarm.share)),
        )

    def _targets(self, alarms: list[Finding]) -> dict[str, tuple[Finding, str]]:
        """Return guilty modules, with what speaks against them and their new level."""
        own = [alarm for alarm in alarms if alarm.module is not None]
        if own:
            return _own_targets(_origins(own, list(self._levels)), self._levels)
        worst = max(alarms, key=lambda alarm: alarm.share)
        n_since = self._n_observed - self._latest_at
        latest = [name for name in self._latest if self._levels[name] != "high"]
        if latest and n_since <= self.limits.n_healthy:
            return {name: (worst, safer(self._levels[name])) for name in latest}
        return {
            name: (worst, "high")
            for name, level in self._levels.items()
            if level != "high"
        }

    def _flip(self, step: int, module: str, alarm: Finding, level: str) -> Decision:
        """Take a module back to a level, or "high" if it was taken back too often."""
        n = self._flips[module] = self._flips[module] + 1
        self._cool_until[module] = self._n_observed + self.limits.cool_down * 2 ** (
            n - 1
        )
        after = "high" if n >= self.limits.max_flips else level
        before, self._levels[module] = self._levels[module], after
        return Decision(
            step=step,
            module=module,
            signal=alarm.signal,
            value=alarm.value,
            before=before,
            after=after,
        )

    def _grow_bolder(self, step: int) -> tuple[Decision, ...]:
        """Bring the next group that can be bolder one level closer to the aim."""
        for group in self._groups:
            ready = [name for name in group if self._may_grow(name)]
            if ready:
                n, self._n_healthy = self._n_healthy, 0
                self._latest, self._latest_at = ready, self._n_observed
                return tuple(self._grow(step, name, n) for name in ready)
        return ()

    def _may_grow(self, name: str) -> bool:
        is_cool = self._n_observed > self._cool_until[name]
        return self._levels[name] != "fp8" and is_cool and name not in self.pinned

    def _grow(self, step: int, module: str, n_healthy: int) -> Decision:
        before = self._levels[module]
        after = self._levels[module] = bolder(before)
        return Decision(
            step=step,
            module=module,
            signal="healthy",
            value=float(n_healthy),
            before=before,
            after=after,
        )

    def rewind(self, statistics: Mapping[str, Mapping[str, float]]) -> None:
        """Take statistics back to those of a snapshot; levels and counts stay."""
        self._running = {kind: Running(**statistics[kind]) for kind in RUNNING}
        self._usual = dict(statistics["underflow"])
        self._n_healthy, self._in_a_row = 0, {}

    def state_dict(self) -> dict[str, Any]:
        """Return all of its state, ready for JSON."""
        return {
            "levels": self.levels,
            "flips": dict(self._flips),
            "cool_until": dict(self._cool_until),
            "latest": list(self._latest),
            "in_a_row": dict(self._in_a_row),
            "statistics": self.statistics,
        } | {name: getattr(self, f"_{name}") for name in COUNTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, bit for bit.

        Raises:
            ValueError: it is of a scheduler with other modules.
        """
        levels = state["levels"]
        if list(levels) != list(self._levels):
            others = sorted(set(levels) ^ set(self._levels)) or list(levels)
            raise ValueError(
                "state must be of a scheduler with the same modules; got one that "
                f"differs in {', '.join(map(repr, others[:3]))}. Make the scheduler "
                "with the model, aim and hardware it was saved with."
            )
        require_levels(levels, tuple(self._levels))
        self._levels = dict(levels)
        self._flips = dict(state["flips"])
        self._cool_until = dict(state["cool_until"])
        self._latest = list(state["latest"])
        self.rewind(state["statistics"])
        self._in_a_row = dict(state["in_a_row"])
        for name in COUNTS:
            setattr(self, f"_{name}", state[name])


def _of_run(signals: StepSignals) -> dict[str, float]:
    """Return loss and log of the gradient's norm, which is spread evenly there."""
    norm = signals.grad_norm
    log_norm = math.log(max(norm, 1e-30)) if math.isfinite(norm) else norm
    return {"loss": signals.loss, "grad_norm": log_norm}


def _origins(alarms: list[Finding], order: list[str]) -> list[Finding]:
    """Return the alarms without those of modules that were given what is not finite."""
    finite = [alarm for alarm in alarms if alarm.kind != "nonfinite"]
    given = [alarm for alarm in alarms if alarm.kind == "nonfinite"]
    forward = [alarm for alarm in given if alarm.gemm == "fprop"]
    if forward:
        return [min(forward, key=lambda alarm: order.index(alarm.module))]
    if given:
        last = max(order.index(alarm.module) for alarm in given)
        return [alarm for alarm in given if alarm.module == order[last]]
    return finite


def _own_targets(
    alarms: list[Finding], levels: Mapping[str, str]
) -> dict[str, tuple[Finding, str]]:
    """Return modules with their worst alarm, and the level that spares them it."""
    targets = {}
    for module in dict.fromkeys(alarm.module for alarm in alarms):
        own = [alarm for alarm in alarms if alarm.module == module]
        is_confined = {alarm.gemm for alarm in own} == {"wgrad"}
        level = "fp8-high-wgrad" if is_confined and levels[module] == "fp8" else "high"
        targets[module] = max(own, key=lambda alarm: alarm.share), level
    return targets


def _in_words(alarm: Finding) -> str:
    """Return what is wrong in a few words."""
    words = WORDS[alarm.kind].format(gemm=alarm.gemm, value=alarm.value)
    if alarm.module is not None:
        return f"{alarm.module}: {words}"
    if math.isinf(alarm.share):
        return f"{words} is not finite"
    return f"{words} is {alarm.value:.1f} standard deviations above its mean"
