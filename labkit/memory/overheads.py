"""What a GPU holds beside what tensors ask for: published ranges, and a verdict.

A prediction counts the bytes that operators ask for. An allocator rounds them up and
leaves gaps between them, the libraries that talk to other ranks have buffers of their
own, and a process pays for its context before the first tensor. Nobody can compute
these from a config, so they are ranges, each with its source. Nothing here has run on
a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from labkit.config import Layout
from labkit.config.checks import require_instance, require_whole
from labkit.hardware import accelerator
from labkit.memory.predict import kernels_of
from labkit.memory.report import MemoryReport

BLOCK_BYTES = 512
"""To a multiple of which PyTorch's CUDA allocator rounds every tensor up."""

BLOCKS_PER_MODULE = 16
"""A bound on the tensors of a module: eight that its backward waits for, and its
weights with gradients, master copies and moments."""

GB = 10**9

Verdict = Literal["fits", "uncertain", "does not fit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Bytes that something takes at least and at most."""

    low: int
    high: int

    source: str
    """Who says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """What one GPU holds beside the bytes of a report."""

    rounding: Range
    """Of each tensor to a whole number of blocks."""

    fragmentation: Range
    """Gaps that are free, but too small for what is asked for."""

    communication: Range
    """Buffers that collectives keep for themselves."""

    context: Range
    """CUDA's context and the kernels that it loaded."""

    def __iter__(self) -> Iterator[Range]:
        yield from (self.rounding, self.fragmentation, self.communication, self.context)

    @property
    def low(self) -> int:
        """Bytes of all of them at least."""
        return sum(part.low for part in self)

    @property
    def high(self) -> int:
        """Bytes of all of them at most."""
        return sum(part.high for part in self)


def overheads(
    report: MemoryReport, layout: Layout | None = None, device: str = "gpu"
) -> Overheads:
    """Return what a rank holds beside the bytes of its report, as ranges.

    On a CPU they are empty: there an allocator gives pages back, and nothing above
    was found in print.

    Args:
        report: what `predict` returns.
        layout: as for `predict`; None is one rank alone.
        device: as for `predict`.

    >>> from labkit.config import PRESETS, TrainConfig
    >>> from labkit.memory import predict
    >>> report = predict(PRESETS["v2-lite-16b"], TrainConfig(), device="h800")
    >>> more = overheads(report, device="h800")
    >>> f"{report.peak / 1e9:.0f} GB, and {more.low / 1e9:.0f} to {more.high / 1e9:.0f}"
    '251 GB, and 13 to 76'

    Raises:
        ValueError: no device has this name, or the layout is none.
    """
    require_instance({"layout": layout}, Layout, optional=True)
    layout = Layout() if layout is None else layout
    if kernels_of(device) == "cpu":
        nothing = Range(low=0, high=0, source="not counted on a CPU")
        return Overheads(
            rounding=nothing,
            fragmentation=nothing,
            communication=nothing,
            context=nothing,
        )
    several = layout.n_ranks > 1
    return Overheads(
        rounding=Range(
            low=0,
            high=(BLOCK_BYTES - 1) * _most_tensors(report, layout),
            source="PyTorch's CUDA allocator: multiples of 512 bytes; tensors bounded",
        ),
        fragmentation=Range(
            low=round(0.05 * report.peak),
            high=round(0.30 * report.peak),
            source="arXiv 2502.07846: 5 to 30 %; 2507.16274 has seen 43 %",
        ),
        communication=Range(
            low=round(0.8 * GB) * several,
            high=2 * GB * several,
            source="arXiv 2502.07846: 0.8 to 2 GB",
        ),
        context=Range(
            low=round(0.3 * GB),
            high=round(0.5 * GB),
            source="the calculator beside arXiv 2411.06465: 0.3 to 0.5 GB",
        ),
    )


def _most_tensors(report: MemoryReport, layout: Layout) -> int:
    """Return a bound on the tensors that live at once, which no report counts."""
    n_in_flight = 2 * layout.pp + 1 if layout.pp > 1 else 1
    return BLOCKS_PER_MODULE * n_in_flight * max(len(report.by_module), 1)


def fits(
    report: MemoryReport,
    capacity: int | None = None,
    *,
    layout: Layout | None = None,
    device: str = "gpu",
) -> Verdict:
    """Return whether a step fits a device, for sure, perhaps, or surely not.

    It fits if it does with the most of all `overheads`, and does not if it does not
    with the least of them. Between these, only a run can tell.

    Args:
        report: what `predict` returns.
        capacity: bytes of the device, as its driver reports them; None takes those of
            the accelerator that `device` names.
        layout: as for `predict`.
        device: as for `predict`.

    >>> from labkit.config import PRESETS, TrainConfig
    >>> from labkit.memory import predict
    >>> report = predict(PRESETS["small"], TrainConfig(), device="h800")
    >>> fits(report, device="h800"), fits(report, 2**28), fits(report, 2**30)
    ('fits', 'does not fit', 'uncertain')

    Raises:
        ValueError: no device has this name, or none of a known capacity; or the layout
            is none.
    """
    kernels_of(device)
    if capacity is None:
        if device in ("cpu", "gpu"):
            raise ValueError(
                "capacity must be given where device names no accelerator; got device="
                f"{device!r}. Set capacity to its bytes, or device='h800' or another."
            )
        capacity = accelerator(device).memory_bytes
    require_whole({"capacity": capacity})
    more = overheads(report, layout, device)
    if report.peak + more.high <= capacity:
        return "fits"
    return "uncertain" if report.peak + more.low <= capacity else "does not fit"
