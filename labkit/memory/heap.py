"""What an allocator makes of a run's requests: the address space it has to reserve."""

from collections.abc import Iterable

from labkit.config.checks import require_whole
from labkit.memory.allocations import Event


def first_fit_bytes(events: Iterable[Event], *, align: int = 512) -> int:
    """Return the bytes from the first to the last address that were ever in use.

    Each storage goes into the lowest hole that holds it; neighbouring holes join. A
    model of an allocator, not PyTorch's own, which keeps pools by size and stream. What
    exceeds the peak of live bytes was lost to holes too small to use.

    Args:
        events: allocations and frees, in order.
        align: sizes are rounded up to a multiple of this; PyTorch's for CUDA is 512.

    >>> a, b, c = Event(1, 512), Event(2, 512), Event(3, 1024)
    >>> first_fit_bytes([a, b, Event(1, -512), c])
    2048
    """
    require_whole({"align": align})
    places: dict[int, tuple[int, int]] = {}
    reserved = 0
    for number, n_bytes in events:
        if n_bytes < 0:
            del places[number]
            continue
        size = -(-n_bytes // align) * align
        start = _lowest_hole(places, size)
        places[number] = (start, start + size)
        reserved = max(reserved, start + size)
    return reserved


def _lowest_hole(places: dict[int, tuple[int, int]], size: int) -> int:
    """Return the lowest address with `size` free bytes after it."""
    end = 0
    for start, stop in sorted(places.values()):
        if start - end >= size:
            break
        end = stop
    return end
