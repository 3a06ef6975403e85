"""Times to set side by side: alternating runs, the fastest of each."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)


def fastest(
    runs: Mapping[Name, Callable[[], object]], *, n_rounds: int = 5, n_threads: int = 1
) -> dict[Name, float]:
    """Return the shortest time of each run in seconds, after one round to warm up.

    The runs take turns, so that a busy moment of the machine befalls all alike; other
    work can only add time, so the shortest counts.

    Args:
        runs: what to time, by name.
        n_rounds: times that each is run.
        n_threads: of PyTorch's; one is disturbed least by what else is going on.
    """
    seconds = {name: float("inf") for name in runs}
    with _threads(n_threads):
        for run in runs.values():
            run()
        for _ in range(n_rounds):
            for name, run in runs.items():
                start = perf_counter()
                run()
                seconds[name] = min(seconds[name], perf_counter() - start)
    return seconds


@contextmanager
def _threads(n_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
