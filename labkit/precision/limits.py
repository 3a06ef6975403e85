"""Where a healthy run ends, how patient one is, and what a step shows beyond."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from labkit.config.checks import (
    named,
    require_above,
    require_at_least,
    require_fraction,
    require_whole,
)
from labkit.precision.signals import GemmSignal, StepSignals


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Thresholds of `PrecisionScheduler`.

    Chosen from runs of "tiny" with all in FP8 that the policy "deepseek-v3" says, and
    from losses and norms of BF16 runs with other seeds.
    """

    most_underflow: float = 0.2
    """Share of an operand's values that may become zero."""

    least_sqnr_db: float = 20.0
    """Signal over noise that a product must keep: a noise of 10 %."""

    most_z: float = 8.0
    """Standard deviations that the loss, and the log of the gradient's norm, may lie
    above their running means."""

    patience: int = 2
    """Steps in a row out of limits that make an alarm. What is not finite makes one at
    once."""

    calm: float = 0.5
    """Share of a limit from which on a step is no alarm but not healthy either: what is
    near its limit grows no bolder."""

    n_healthy: int = 10
    """Steps in a row, all healthy, after which one group becomes bolder."""

    n_warm_up: int = 20
    """Steps before loss and norm can alarm, and before anything grows bolder: until
    then their spread is not known."""

    span: int = 50
    """Steps that running statistics remember, roughly."""

    cool_down: int = 50
    """Observed steps before a module that was taken back may be bolder again; twice as
    many each further time."""

    max_flips: int = 3
    """Times that a module may be taken back; from the last on it stays "high"."""

    max_rollbacks: int = 3
    """Times in a row that a run may be taken back to the same place while no module can
    be made safer: then the trouble is none of precision."""

    def __post_init__(self) -> None:
        counts = ("patience", "n_healthy", "n_warm_up", "span", "cool_down")
        require_whole(named(self, *counts, "max_flips"))
        require_whole(named(self, "max_rollbacks"), at_least=0)
        require_above(named(self, "most_underflow", "most_z", "calm"), 0)
        require_fraction(named(self, "most_underflow", "calm"))
        require_at_least(named(self, "least_sqnr_db"), 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """A signal that is out of its limits, or near them."""

    module: str | None
    """None of what belongs to the whole run: its loss and its gradient's norm."""

    gemm: str | None

    kind: str
    """`nonfinite`, `underflow`, `sqnr`, `loss` or `grad_norm`."""

    value: float
    """As it was measured; of loss and norm, if finite, the standard deviations."""

    share: float
    """Of what the limit allows, from `Limits.calm` on; infinite if not finite."""

    @property
    def key(self) -> str:
        """Name of the signal, alike in all steps."""
        words = (self.module, self.gemm, self.kind)
        return " ".join(word for word in words if word is not None)

    @property
    def signal(self) -> str:
        """The same without its module."""
        return f"{self.gemm} {self.kind}" if self.gemm else self.kind


def findings(
    signals: StepSignals, levels: Mapping[str, str], limits: Limits
) -> Iterator[Finding]:
    """Yield what modules show that is near or out of limits; those "high" show nothing.

    >>> lossy = {"head": {"wgrad": GemmSignal(0.3, 26.0, 0)}}
    >>> step = StepSignals(step=1, loss=2.0, grad_norm=1.0, gemms=lossy)
    >>> [(f.key, round(f.share, 2)) for f in findings(step, {"head": "fp8"}, Limits())]
    [('head wgrad underflow', 1.5), ('head wgrad sqnr', 0.5)]
    """
    for module, level in levels.items():
        if level == "high":
            continue
        for gemm, signal in signals.gemms.get(module, {}).items():
            for kind, value, share in _shares(signal, limits):
                if share >= limits.calm:
                    yield Finding(module, gemm, kind, value, share)


def _shares(signal: GemmSignal, limits: Limits) -> Iterator[tuple[str, float, float]]:
    """Yield kinds of signals, their values, and what these are of their limits."""
    if signal.n_nonfinite_tiles:
        yield "nonfinite", float(signal.n_nonfinite_tiles), math.inf
        return
    yield "underflow", signal.underflow, signal.underflow / limits.most_underflow
    above = signal.sqnr_db - limits.least_sqnr_db
    yield "sqnr", signal.sqnr_db, 10 ** (-above / 20)
