"""Where a healthy run ends, and how patient the scheduler is."""

from dataclasses import dataclass

from labkit.config.checks import named, require_above, require_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Thresholds of `PrecisionScheduler`."""

    most_underflow: float = 0.2
    """Share of an operand's values that may become zero."""

    least_sqnr_db: float = 20.0
    """Signal over noise that a product must keep; FP8 in tiles has about 28 dB."""

    most_z: float = 6.0
    """Standard deviations that loss and log of the gradient's norm may rise."""

    patience: int = 2
    """Steps in a row out of limits that make an alarm. What is not finite makes one at
    once."""

    n_healthy: int = 10
    """Steps in a row without a doubt after which one group becomes bolder."""

    calm: float = 0.5
    """Share of a limit above which a step is not healthy, though no alarm either: what
    came down from the limit stays where it is until it is well below."""

    n_warm_up: int = 20
    """Steps before loss and norm can alarm: until then their spread is not known."""

    span: int = 50
    """Steps that running statistics remember, roughly."""

    cool_down: int = 50
    """Steps before a module that was taken back may be bolder again; twice as many each
    time."""

    max_flips: int = 3
    """Times that a module may be taken back; from then on it stays "high"."""

    def __post_init__(self) -> None:
        counts = ("patience", "n_healthy", "n_warm_up", "span", "cool_down")
        require_whole(named(self, *counts, "max_flips"))
        require_above(named(self, "most_underflow", "calm", "most_z"), 0)
