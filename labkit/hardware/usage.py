"""What memory this process uses, and what it could use."""

import psutil
import torch

from labkit.hardware.machine import detect


def used_memory(device: torch.device) -> int:
    """Return the process's resident set; on CUDA the peak of bytes allocated.

    On CUDA this has not been run.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def reachable_memory(device: torch.device) -> int:
    """Return the bytes that this process could have here: its own, and those free.

    On CUDA this has not been run.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    machine = detect()
    most = machine.available_memory_bytes + used_memory(device)
    limit = machine.memory_limit_bytes
    return most if limit is None else min(most, limit)
