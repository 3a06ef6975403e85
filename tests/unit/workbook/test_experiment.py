"""Work started by a button: seen while it grows, stopped without loss, never silent."""

import threading

import pytest

from labkit.workbook.figures import Part, bars
from labkit.workbook.widgets import experiment, slider
from labkit.workbook.widgets.experiment import Bench, Throttle


def draw(result):
    return bars([Part(name="steps", amount=float(result))], title="t", x="steps")


def describe(result):
    return f"{result} steps"


def bench_of(work):
    return Bench(work, draw, describe, {"n": slider("steps", (1, 9), value=3)})


def test_the_last_result_is_shown_when_the_work_ends():
    bench = bench_of(lambda n: ((i / n, i) for i in range(1, n + 1)))
    bench.run_button.click()
    bench.wait(10)

    assert "3 steps" in bench.view.status.value
    assert bench.progress.value == 1.0
    assert not bench.run_button.disabled
    assert bench.stop_button.disabled


def test_stopping_keeps_the_last_result_and_closes_the_work():
    reached, closed = threading.Event(), threading.Event()

    def work(n):
        try:
            for i in range(1, 10_000):
                yield 0.1, i
                if i == 5:
                    reached.set()
                    bench.stop_button.click()
        finally:
            closed.set()

    bench = bench_of(work)
    bench.start()
    bench.wait(10)

    assert reached.is_set()
    assert closed.is_set()
    assert "stopped: 6 steps" in bench.view.status.value
    assert not bench.run_button.disabled


def test_an_error_in_the_work_is_told_and_run_is_possible_again():
    def work(n):
        yield 0.5, 1
        raise ValueError("the context must be shorter")

    bench = bench_of(work)
    bench.start()
    bench.wait(10)

    assert "✗ the context must be shorter" in bench.view.status.value
    assert not bench.run_button.disabled


def test_a_second_start_while_running_changes_nothing():
    go, started = threading.Event(), []

    def work(n):
        started.append(n)
        go.wait(10)
        yield 1.0, n

    bench = bench_of(work)
    bench.start()
    bench.start()
    go.set()
    bench.wait(10)

    assert started == [3]


def test_work_without_a_result_says_so():
    bench = bench_of(lambda n: iter(()))
    bench.start()
    bench.wait(10)

    assert "The work gave no result." in bench.view.status.value


def test_nothing_runs_until_the_button_is_pressed(capsys):
    def work(n):
        pytest.fail("started by itself")
        yield 1.0, n

    experiment(work, draw, describe, caption="Counts.", n=slider("n", (1, 2), value=1))
    assert capsys.readouterr().out == "Experiment: Counts.\n"


def test_drawing_takes_a_twentieth_of_the_time_at_most(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    throttle = Throttle()
    assert throttle.is_due()
    throttle.spent(0.2)
    now[0] += 3.9
    assert not throttle.is_due()
    now[0] += 0.2
    assert throttle.is_due()
