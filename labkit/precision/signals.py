"""What a training step shows of its numbers: losses, norms, and what FP8 loses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

GEMMS = ("fprop", "dgrad", "wgrad")
"""The three products of a module, as in `labkit.precision.products`."""


@dataclass(frozen=True, slots=True)
class GemmSignal:
    """What the operands of one product lost by quantization in a step."""

    underflow: float
    """Share, among sampled values other than zero, of those that became zero; of the
    operand that lost more."""

    sqnr_db: float
    """Signal over quantization noise, of both operands' sampled rows together; infinite
    where nothing is lost. Tiles that are not finite are left out."""

    n_nonfinite_tiles: int
    """Tiles that held an infinity or NaN, of all there were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSignals:
    """All that a scheduler is told of a training step."""

    step: int
    """Steps done with it, as in `StepMetrics`."""

    loss: float
    grad_norm: float
    """Before clipping."""

    gemms: Mapping[str, Mapping[str, GemmSignal]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Of modules in FP8, by name, and by which of `GEMMS`; what was not watched, or was
    not in FP8, is not there."""
