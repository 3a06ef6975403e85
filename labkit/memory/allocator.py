"""What PyTorch's CUDA allocator says of a step: bytes handed out, and bytes taken.

Blocks are rounded up, so that it hands out more than tensors ask for; and it takes
whole segments from the driver, so that it holds more than it hands out. It is asked
beside the dispatcher's count, which knows parts but neither of these. Tested with the
answers of an allocator that is none: this has not run on a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorPeaks:
    """Most bytes of one device's allocator over a step."""

    allocated: int
    """In blocks that are in use, those of the process's other tensors among them."""

    reserved: int
    """Taken from the driver, in use or not."""

    @property
    def unused(self) -> int:
        """Bytes reserved beyond the most that were in use at once: fragments and cache.

        >>> AllocatorPeaks(allocated=60, reserved=75).unused
        15
        """
        return self.reserved - self.allocated


@contextlib.contextmanager
def allocator_peaks(
    device: torch.device,
) -> Iterator[Callable[[], AllocatorPeaks | None]]:
    """Watch a device's allocator; yield a function that returns its peaks since.

    On anything but CUDA it returns None: no other allocator counts.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: AllocatorPeaks(
        allocated=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.max_memory_reserved(device),
    )
