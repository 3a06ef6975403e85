"""A watched step beside other threads, whose modules and optimizers are their own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.config import TrainConfig
from labkit.memory.measure import measure
from labkit.memory.out_of_memory import memory_guard
from labkit.model import Transformer


@contextmanager
def elsewhere(work: Callable[[Callable[[], None]], object]) -> Iterator[Callable]:
    """Run work in another thread up to where it calls its argument.

    Yields a function that lets it go on from there, and returns what it raised.
    """
    arrived, may_go, errors = threading.Event(), threading.Event(), []

    def pause() -> None:
        arrived.set()
        assert may_go.wait(30)

    def run() -> None:
        try:
            work(pause)
        except BaseException as error:
            errors.append(error)

    def end() -> list[BaseException]:
        may_go.set()
        thread.join(30)
        assert not thread.is_alive()
        return errors

    thread = threading.Thread(target=run)
    thread.start()
    assert arrived.wait(30)
    try:
        yield end
    finally:
        end()


def paused_forward(pause: Callable[[], None]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].register_forward_pre_hook(lambda *_: pause())
    model(torch.ones(1, 8))


def guarded(step: Callable[[], object], model: Transformer) -> None:
    with memory_guard(model, TrainConfig(), limit=2**40):
        step()


@pytest.mark.parametrize("watched", [measure, guarded])
def test_a_thread_that_was_in_a_forward_as_the_watch_began_goes_on(watched, dense):
    model, errors = Transformer(dense), []
    with elsewhere(paused_forward) as end:

        def step() -> None:
            model(torch.zeros(1, 8, dtype=torch.int64))
            errors.append(end())

        watched(step, model)

    assert errors == [[]]


def test_modules_of_another_thread_are_not_those_that_run_in_this_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()

    def step_beside_a_forward() -> None:
        model.zero_grad()
        with elsewhere(paused_forward):
            step()

    alone = measure(step, model).by_module
    assert measure(step_beside_a_forward, model).by_module == alone == {"1": 2 * 8 * 4}


def test_an_optimizer_of_another_thread_holds_nothing_of_this_ones_step():
    model = nn.Linear(8, 8)

    def steps_elsewhere(pause: Callable[[], None]) -> None:
        weight = nn.Parameter(torch.ones(64))
        optimizer = torch.optim.SGD([weight], momentum=0.9)
        weight.sum().backward()
        optimizer.step()
        pause()

    def step() -> None:
        with elsewhere(steps_elsewhere):
            model(torch.ones(2, 8)).sum().backward()

    report = measure(step, model)
    assert not {"master", "moments"} & report.by_part.keys()
    assert "optimizer" not in [instant.name for instant in report.timeline]


def test_a_backward_in_a_thread_of_autograds_own_is_watched():
    model, threads = nn.Linear(8, 8, bias=False), set()
    model.weight.register_hook(lambda _: threads.add(threading.get_ident()))

    def deep(x, depth):
        if depth == 0:
            return model(x)
        return checkpoint(deep, x, depth - 1, use_reentrant=True)

    def step() -> None:
        # Autograd runs a backward within 60 others in another thread.
        deep(torch.ones(2, 8, requires_grad=True), 62).sum().backward()

    report = measure(step, model)
    assert threads and threading.get_ident() not in threads
    assert report.by_part["gradients"] == model.weight.nbytes
