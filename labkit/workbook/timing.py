"""Times to set side by side: alternating runs, the fastest of each."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch

from labkit.hardware import Roofline
from labkit.hardware.units import rate

Name = TypeVar("Name", bound=Hashable)

SLACK = 1.05
"""How much faster one core may seem on a machine that has no other."""


def fastest(
    runs: Mapping[Name, Callable[[], object]],
    *,
    n_rounds: int = 5,
    n_threads: int = 1,
    clock: Callable[[], float] = perf_counter,
    warms_up: bool = True,
) -> dict[Name, float]:
    """Return the shortest time of each run in seconds, after one round to warm up.

    The runs take turns, so that a busy moment of the machine befalls all alike; other
    work can only add time, so the shortest counts.

    Args:
        runs: what to time, by name.
        n_rounds: times that each is run.
        n_threads: of PyTorch's; one is disturbed least by what else is going on.
        clock: what tells the time; `time.process_time` leaves out other processes.
        warms_up: False leaves that round out, where all have run before.
    """
    seconds = {name: float("inf") for name in runs}
    with _threads(n_threads):
        for run in runs.values() if warms_up else ():
            run()
        for _ in range(n_rounds):
            for name, run in runs.items():
                start = clock()
                run()
                seconds[name] = min(seconds[name], clock() - start)
    return seconds


def agreement(every: Roofline, one: Roofline) -> str:
    """Return whether all cores beat one, as they must, in FP32 products.

    Args:
        every: measured on all cores.
        one: measured on one of them.
    """
    all_cores, one_core = (each.gemm_flops["float32"] for each in (every, one))
    line = f"{rate(one_core, 'FLOP/s')} on one, {rate(all_cores, 'FLOP/s')} on all"
    if one_core > SLACK * all_cores:
        return f"{line}: something else is running; measure both again"
    return line


@contextmanager
def _threads(n_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
