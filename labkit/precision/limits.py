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

    Chosen by what healthy runs of "tiny" show, with all in FP8 that "deepseek-v3" says,
    and what faults of `labkit.precision.faults` do to them. Only steps of patience in a
    row count, so that what a single step shows may be beyond.
    """

    most_underflow: float = 0.05
    """Share of a layer's input, or weight, that may become zero. Healthy: up to 0.006;
    with an outlier of 1e5 in one channel of 128 to 384: 0.06 to 0.25. It is of the
    whole input: in a layer of thousands of channels one outlier shows less."""

    most_gradient_underflow: float = 0.5
    """Share of a gradient, or of what is tiled along the tokens for the weight's, that
    may become zero. Healthy: up to 0.17, and in one run of four 0.31 in two steps in a
    row, where attention's queries of many tokens hardly matter; with nine of ten tokens
    of an input at 1e-5: 0.28 to 0.9, at once, which `most_rise` sees."""

    most_rise: float = 0.15
    """By how much either share may be above its own running mean, which shows a sudden
    change before the limits do. Healthy: up to 0.08, in a single step."""

    least_sqnr_db: float = 20.0
    """Signal over noise that a product must keep: a noise of 10 %. Healthy: 26.8."""

    most_z: float = 5.0
    """Standard deviations that the loss, and the log of the gradient's norm, may lie
    above their running means. Healthy: the norm up to 13 in a single step, but not
    beyond 2.5 in two steps in a row."""

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

    span: int = 30
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
        shares = ("most_underflow", "most_gradient_underflow", "most_rise", "calm")
        require_above(named(self, *shares, "most_z"), 0)
        require_fraction(named(self, *shares))
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
    signals: StepSignals,
    levels: Mapping[str, str],
    limits: Limits,
    usual: Mapping[str, float],
) -> Iterator[Finding]:
    """Yield what modules show that is near or out of limits; those "high" show nothing.

    Args:
        signals: of a step.
        levels: of the modules.
        limits: where a healthy run ends.
        usual: running means of underflow, by `underflow_key`; none of a new product.

    >>> lossy = {"head": {"wgrad": GemmSignal(0.75, 26.0, 0)}}
    >>> step = StepSignals(step=1, loss=2.0, grad_norm=1.0, gemms=lossy)
    >>> found = findings(step, {"head": "fp8"}, Limits(), {})
    >>> [(f.key, round(f.share, 2)) for f in found]
    [('head wgrad underflow', 1.5), ('head wgrad sqnr', 0.5)]
    """
    for module, gemm, signal in watched(signals, levels):
        mean = usual.get(underflow_key(module, gemm), math.inf)
        for kind, value, share in _shares(gemm, signal, limits, mean):
            if share >= limits.calm:
                yield Finding(module, gemm, kind, value, share)


def watched(
    signals: StepSignals, levels: Mapping[str, str]
) -> Iterator[tuple[str, str, GemmSignal]]:
    """Yield modules that are in FP8, their products, and what these show."""
    for module, level in levels.items():
        if level != "high":
            for gemm, signal in signals.gemms.get(module, {}).items():
                yield module, gemm, signal


def underflow_key(module: str, gemm: str) -> str:
    """Return the name under which a product's usual underflow is kept.

    >>> underflow_key("head", "wgrad")
    'head wgrad'
    """
    return f"{module} {gemm}"


def _shares(
    gemm: str, signal: GemmSignal, limits: Limits, usual: float
) -> Iterator[tuple[str, float, float]]:
    """Yield kinds of signals, their values, and what these are of their limits."""
    if signal.n_nonfinite_tiles:
        yield "nonfinite", float(signal.n_nonfinite_tiles), math.inf
        return
    is_forward = gemm == "fprop"
    most = limits.most_underflow if is_forward else limits.most_gradient_underflow
    rise = (signal.underflow - usual) / limits.most_rise
    yield "underflow", signal.underflow, max(signal.underflow / most, rise)
    above = signal.sqnr_db - limits.least_sqnr_db
    yield "sqnr", signal.sqnr_db, 10 ** (-above / 20)
