"""Where the bytes are: what operators allocate, and what an allocator makes of it."""

from labkit.memory.allocations import AllocationCount, Event
from labkit.memory.heap import first_fit_bytes
from labkit.memory.report import Instant, MemoryReport

__all__ = ["AllocationCount", "Event", "Instant", "MemoryReport", "first_fit_bytes"]
