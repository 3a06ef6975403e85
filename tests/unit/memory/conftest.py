"""A run that is watched for leaks, as several tests need it."""

from collections.abc import Callable

import pytest
from torch import nn

from labkit.memory.leaks import LeakReport, LeakWatch

N_STEPS = 9


@pytest.fixture
def watch() -> Callable[[nn.Module, Callable[[], object]], LeakReport]:
    """Return a function that runs a step often enough, and tells what grew."""

    def run(model: nn.Module, step: Callable[[], object]) -> LeakReport:
        with LeakWatch(model) as leak_watch:
            for _ in range(N_STEPS):
                step()
                leak_watch.end_step()
        return leak_watch.report()

    return run
