"""Where the bytes are: predicted by arithmetic, measured, and cut by recomputing."""

from labkit.memory.allocations import AllocationCount, Event
from labkit.memory.budget import budget
from labkit.memory.comparison import against_measured, published_rows
from labkit.memory.cost import recompute_cost
from labkit.memory.fakes import faked
from labkit.memory.formats import converted_formats
from labkit.memory.full_size import local_experts, measure_stage, predict_stage
from labkit.memory.heap import first_fit_bytes
from labkit.memory.leaks import LeakReport, LeakWatch
from labkit.memory.measure import measure
from labkit.memory.out_of_memory import OutOfMemory, memory_guard
from labkit.memory.overheads import Overheads, fits, overheads
from labkit.memory.persistent import STATES, States, persistent
from labkit.memory.predict import predict
from labkit.memory.recompute import RECOMPUTE_POLICIES, apply_recompute
from labkit.memory.remedies import Fit, Remedy, remedies, what_fits
from labkit.memory.report import Instant, MemoryReport

__all__ = [
    "RECOMPUTE_POLICIES",
    "STATES",
    "AllocationCount",
    "Event",
    "Fit",
    "Instant",
    "LeakReport",
    "LeakWatch",
    "MemoryReport",
    "OutOfMemory",
    "Overheads",
    "Remedy",
    "States",
    "against_measured",
    "apply_recompute",
    "budget",
    "converted_formats",
    "faked",
    "first_fit_bytes",
    "fits",
    "local_experts",
    "measure",
    "measure_stage",
    "memory_guard",
    "overheads",
    "persistent",
    "predict",
    "predict_stage",
    "published_rows",
    "recompute_cost",
    "remedies",
    "what_fits",
]
