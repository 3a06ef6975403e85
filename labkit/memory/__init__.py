"""Where the bytes are: predicted by arithmetic, measured, and cut by recomputing."""

from labkit.memory.allocations import AllocationCount, Event
from labkit.memory.budget import budget
from labkit.memory.cost import recompute_cost
from labkit.memory.fakes import faked
from labkit.memory.heap import first_fit_bytes
from labkit.memory.leaks import LeakReport, LeakWatch
from labkit.memory.measure import measure
from labkit.memory.overheads import Overheads, fits, overheads
from labkit.memory.persistent import STATES, States, persistent
from labkit.memory.predict import predict
from labkit.memory.recompute import RECOMPUTE_POLICIES, apply_recompute
from labkit.memory.report import Instant, MemoryReport

__all__ = [
    "RECOMPUTE_POLICIES",
    "STATES",
    "AllocationCount",
    "Event",
    "Instant",
    "LeakReport",
    "LeakWatch",
    "MemoryReport",
    "Overheads",
    "States",
    "apply_recompute",
    "budget",
    "faked",
    "first_fit_bytes",
    "fits",
    "measure",
    "overheads",
    "persistent",
    "predict",
    "recompute_cost",
]
