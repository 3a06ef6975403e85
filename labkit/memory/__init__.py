"""Where the bytes are: predicted by arithmetic, measured, and cut by recomputing."""

from labkit.memory.allocations import AllocationCount, Event
from labkit.memory.heap import first_fit_bytes
from labkit.memory.measure import measure
from labkit.memory.persistent import STATES, States, persistent
from labkit.memory.recompute import RECOMPUTE_POLICIES, apply_recompute
from labkit.memory.report import Instant, MemoryReport

__all__ = [
    "RECOMPUTE_POLICIES",
    "STATES",
    "AllocationCount",
    "Event",
    "Instant",
    "MemoryReport",
    "States",
    "apply_recompute",
    "first_fit_bytes",
    "measure",
    "persistent",
]
