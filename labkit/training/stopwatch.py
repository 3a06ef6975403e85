"""Wall time of a step, split into laps."""

import time
from collections import Counter

import torch


class Stopwatch:
    """Adds up the time between calls of `lap` under their names.

    A CUDA device is waited for at every lap, so that a lap holds the work and not
    only its launch; this costs a few microseconds of overlap per lap. On CUDA this
    has not been run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: Counter[str] = Counter()
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Charge the time since the previous lap to `name`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name] += now - self._last
        self._last = now
