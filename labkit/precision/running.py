"""Running statistics of a number that wanders, which outliers hardly move."""

import math
from dataclasses import asdict, dataclass

PER_DEVIATION = 1.2533
"""Standard deviations in the mean absolute one, of a normal distribution: √(π/2)."""


@dataclass(kw_only=True, slots=True)
class Running:
    """Exponentially weighted mean and mean absolute deviation.

    Up to `span` values count alike; from then on the weight of each halves in about
    0.7 spans. A falling mean lags behind the values, and widens the deviation, so that
    early in training an alarm takes more.
    """

    span: int
    """Steps that the statistics remember, roughly."""

    least: float
    """Deviation that counts as none."""

    mean: float = 0.0
    deviation: float = 0.0
    n: int = 0

    def z(self, value: float) -> float:
        """Return how many standard deviations a value lies above the mean.

        >>> losses = Running(span=10, least=0.01)
        >>> for value in (2.0, 2.1, 1.9, 2.0, 2.1, 1.9):
        ...     losses.add(value)
        >>> round(losses.z(3.0), 1)
        8.5
        """
        spread = max(PER_DEVIATION * self.deviation, self.least)
        return (value - self.mean) / spread

    def add(self, value: float, *, most: float = math.inf) -> None:
        """Take a value in, cut to `most` standard deviations off the mean."""
        if self.n > 0:
            spread = max(PER_DEVIATION * self.deviation, self.least)
            value = min(
                max(value, self.mean - most * spread), self.mean + most * spread
            )
        self.n += 1
        weight = max(1 / self.n, 1 / self.span)
        if self.n > 1:
            off = abs(value - self.mean)
            # The first value has no deviation.
            share = max(1 / (self.n - 1), 1 / self.span)
            self.deviation += share * (off - self.deviation)
        self.mean += weight * (value - self.mean)

    def state_dict(self) -> dict[str, float]:
        """Return all that `load_state_dict` needs, ready for JSON."""
        return asdict(self)
