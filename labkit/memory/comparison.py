"""Predicted beside published, and predicted beside measured: errors with their sign.

What others have published stands in `data/published_memory.csv`, each row with its
source, how near labkit must come, and what that takes for granted. What labkit computes
for it comes from `labkit.memory.reported`.
"""

import math
from dataclasses import dataclass

from labkit.data import read_rows
from labkit.memory.report import PERSISTENT, MemoryReport
from labkit.memory.reported import reported_figures

UNITS = {
    "B": 1,
    "MiB": 2**20,
    "GiB": 2**30,
    "GB": 10**9,
    "parameters": 1,
    "billion": 10**9,
    "percent": 0.01,
}

KEPT = ("activations", "dispatch")
"""Parts that the backward waits for, without the logits, which are no module's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A figure that others have published, beside labkit's."""

    section: str
    """Number of the paper on arXiv, or name of the run."""

    item: str
    published: float
    """In `unit`, and so is `ours`."""

    ours: float
    unit: str

    tolerance: str
    """A share; "rounding", to the digits published; or "none", where the difference is
    shown and nothing is claimed."""

    largest: float
    """Difference that the tolerance allows, in `unit`."""

    assumption: str
    source: str

    @property
    def error(self) -> float:
        """Share by which ours is above the published figure; below it if negative."""
        return self.ours / self.published - 1

    @property
    def is_within(self) -> bool:
        return abs(self.ours - self.published) <= self.largest


def published_rows() -> tuple[Published, ...]:
    """Return all figures of `data/published_memory.csv`, each beside labkit's.

    >>> row = next(x for x in published_rows() if x.item == "states, ZeRO 1")
    >>> row.published, round(row.ours, 2), row.unit, row.is_within
    (40.46, 40.46, 'GiB', True)
    """
    figures = reported_figures()
    return tuple(
        Published(
            section=row["section"],
            item=row["item"],
            published=float(row["value"]),
            ours=figures[row["section"], row["item"]] / UNITS[row["unit"]],
            unit=row["unit"],
            tolerance=row["tolerance"],
            largest=largest_difference(row["value"], row["tolerance"]),
            assumption=row["assumption"],
            source=row["source"],
        )
        for row in read_rows("published_memory.csv")
    )


def largest_difference(value: str, tolerance: str) -> float:
    """Return how far a figure may be from one published, given as it is printed.

    >>> largest_difference("81.54", "rounding"), largest_difference("36.0", "10%")
    (0.005, 3.6)
    """
    if tolerance == "none":
        return math.inf
    if tolerance == "rounding":
        n_decimals = len(value.partition(".")[2])
        return 0.5 * 10**-n_decimals
    return float(tolerance.removesuffix("%")) / 100 * float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measured step, beside what was predicted of it."""

    name: str

    persistent_difference: int
    """Bytes by which lasting parts differ, added up without sign."""

    activations: int
    """Bytes measured at the end of the last forward pass."""

    activations_error: float
    """Share by which the prediction is above; below if negative."""

    peak: int
    peak_error: float


def against_measured(
    name: str, predicted: MemoryReport, measured: MemoryReport
) -> Measured:
    """Return how a prediction compares with what `measure` has seen of the same step.

    Lasting parts are read as the optimizer runs, when all of them are there.

    >>> from labkit.memory.report import Instant
    >>> def report(kept):
    ...     end = Instant(name="end of forward", by_part={"activations": kept})
    ...     update = Instant(name="optimizer", by_part={"weights": 50})
    ...     return MemoryReport(timeline=(end, update))
    >>> compared = against_measured("step", report(99), report(100))
    >>> compared.persistent_difference, f"{compared.activations_error:+.1%}"
    (0, '-1.0%')
    """
    ours, theirs = (_last(report, "optimizer") for report in (predicted, measured))
    kept, measured_kept = (
        sum(_last(report, "end of forward").get(part, 0) for part in KEPT)
        for report in (predicted, measured)
    )
    return Measured(
        name=name,
        persistent_difference=sum(
            abs(ours.get(part, 0) - theirs.get(part, 0)) for part in PERSISTENT
        ),
        activations=measured_kept,
        activations_error=kept / measured_kept - 1,
        peak=measured.peak,
        peak_error=predicted.peak / measured.peak - 1,
    )


def _last(report: MemoryReport, name: str) -> dict[str, int]:
    return dict([x.by_part for x in report.timeline if x.name == name][-1])
