"""A precision scheduler: it decides, watches, and takes back.

It starts with the modules that a conservative policy has in FP8 and grows bolder, one
group of modules at a time, up to another policy. It sees signals of each step, and says
what is to become of which module, and whether the step is to be undone; it changes no
model itself. Levels are those of `labkit.precision.levels`.

Such a scheduler is a proposal of articles. DeepSeek-V3's own policy is static, and its
report knows of no rollback.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.config import ModelConfig
from labkit.precision.levels import modules_in_fp8
from labkit.precision.limits import Limits
from labkit.precision.policies import PrecisionPolicy, policy_of
from labkit.precision.signals import StepSignals


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
        self._levels = {
            name: "fp8" if name in at_start else "high"
            for name in modules_in_fp8(cfg, self.aim, hardware)
        }
        self._statistics: dict[str, Any] = {}

    @property
    def levels(self) -> dict[str, str]:
        """Level of each module that `aim` has in FP8, in the order of the forward."""
        return dict(self._levels)

    @property
    def statistics(self) -> dict[str, Any]:
        """What a snapshot of the run keeps for `rewind`, ready for JSON."""
        return dict(self._statistics)

    def observe(self, signals: StepSignals) -> Verdict:
        """Take in a step, change levels, and say what changed and what is to be done.

        Whoever acts sets the levels, and after a verdict to roll back calls `rewind`.
        """
        return Verdict()

    def rewind(self, statistics: Mapping[str, Any]) -> None:
        """Take statistics back to those of a snapshot; levels and counts stay."""
        self._statistics = dict(statistics)

    def state_dict(self) -> dict[str, Any]:
        """Return all of its state, ready for JSON."""
        return {"levels": self.levels, "statistics": self.statistics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._levels = dict(state["levels"])
        self._statistics = dict(state["statistics"])
