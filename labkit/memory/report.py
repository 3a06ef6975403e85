"""One form for bytes that were predicted and bytes that were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.memory.allocator import AllocatorPeaks

PERSISTENT = ("weights", "master", "gradients", "moments")
"""Parts that last from step to step."""

PARTS = (
    *PERSISTENT,
    "activations",
    "logits",
    "dispatch",
    "communication",
    "temporaries",
)
"""What a rank's bytes are for, in the order in which tables and bars show them."""

_NAMES = frozenset(PARTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """What lives at one instant of a training step."""

    name: str
    """As in "end of forward" or "optimizer"."""

    by_part: Mapping[str, int]
    """Bytes of each part that lives now; a part left out has none."""

    def __post_init__(self) -> None:
        by_part = self.by_part
        if by_part.keys() <= _NAMES and min(by_part.values(), default=0) >= 0:
            return
        for part, n_bytes in by_part.items():
            if part not in PARTS or n_bytes < 0:
                raise ValueError(
                    f"by_part maps names in {', '.join(PARTS)} to bytes of 0 or more; "
                    f"got {part!r}: {n_bytes!r}. Correct this entry."
                )

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.by_part.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Bytes of one rank over a training step, or of its busiest rank.

    >>> forward = Instant(name="end of forward", by_part={"weights": 8, "logits": 6})
    >>> update = Instant(name="optimizer", by_part={"weights": 8, "moments": 4})
    >>> report = MemoryReport(timeline=(forward, update))
    >>> report.peak, report.peak_instant.name, report.total
    (14, 'end of forward', 18)
    """

    timeline: tuple[Instant, ...]
    """Instants in the order of the step."""

    by_module: Mapping[str, int] = field(default_factory=dict)
    """Bytes of activations kept for the backward, by the module's name."""

    by_stage: tuple["MemoryReport", ...] = ()
    """A report for each pipeline stage; empty when there is one only."""

    allocator: AllocatorPeaks | None = None
    """What a GPU's allocator held in a measured step; None elsewhere."""

    def __post_init__(self) -> None:
        if not self.timeline:
            raise ValueError(
                "timeline must hold an instant at least; got none. Give the state "
                "between two steps."
            )

    @property
    def peak_instant(self) -> Instant:
        """The first instant at which most bytes live."""
        return max(self.timeline, key=lambda instant: instant.total)

    @property
    def peak(self) -> int:
        """Most bytes that live at once: not a sum of parts that never meet."""
        return self.peak_instant.total

    @property
    def by_part(self) -> dict[str, int]:
        """Most bytes of each part at any instant, in the order of `PARTS`."""
        most = {
            part: max(instant.by_part.get(part, 0) for instant in self.timeline)
            for part in PARTS
        }
        return {part: n_bytes for part, n_bytes in most.items() if n_bytes}

    @property
    def persistent(self) -> int:
        """Bytes that last from step to step."""
        by_part = self.by_part
        return sum(by_part.get(part, 0) for part in PERSISTENT)

    @property
    def total(self) -> int:
        """Sum of `by_part`, as papers' tables add it up; at least the peak."""
        return sum(self.by_part.values())
