"""The exercise engine against answers of every kind, good, bad and hostile."""

import contextlib
import math
import sys
import threading
import time

import pytest
import torch

from labkit.workbook.exercises import Case, Exercise, Misconception, Score, grade
from labkit.workbook.exercises.sandbox import run_within


def make(**changes):
    values = {
        "name": "double",
        "kind": "write",
        "title": "Twice",
        "difficulty": 1,
        "minutes": 1,
        "task": "Write `double(x)`.",
        "stub": "def double(x):\n    ...",
        "cases": (
            Case(given="x=3", args=(3,), expected=6),
            Case(given="x=0", args=(0,), expected=0),
        ),
        "misconceptions": (
            Misconception(lambda x: x * x, "that is the square"),
            Misconception(lambda x: x + 3, "that adds three"),
        ),
        "hints": ("Add it to itself.", "`2 * x`"),
        "solution": lambda x: 2 * x,
        "seconds": 0.3,
    }
    return Exercise(**values | changes)


def test_a_right_answer_counts_its_cases():
    assert grade(make(), lambda x: x + x).line == "✓ 2/2"


def test_a_wrong_answer_shows_the_case_the_value_and_the_right_one():
    assert grade(make(), lambda x: x).line == "✗ for x=3: you gave 3, expected 6"


def test_a_misconception_is_recognised_by_its_values_in_all_failing_cases():
    assert grade(make(), lambda x: x**2).line == (
        "✗ for x=3: you gave 9, expected 6 (that is the square)"
    )
    # Equal to "adds three" in the second case only, so the name would be wrong.
    assert grade(make(), lambda x: x or 3).line == "✗ for x=3: you gave 3, expected 6"


def dots(x): ...


def documented(x):
    """Only words."""


def unfinished(x):
    raise NotImplementedError


@pytest.mark.parametrize(
    "stub", [None, ..., dots, documented, unfinished, lambda x: None]
)
def test_a_stub_is_not_attempted(stub):
    assert grade(make(), stub).line == "○ not attempted"


def test_a_function_that_returns_a_constant_is_an_attempt():
    assert grade(make(), lambda x: 6).mark == "✗"


def test_planted_code_is_not_attempted_until_it_changes():
    planted = make(kind="fix", stub="def double(x):\n    return [x][0] + 1")

    def as_given(x):
        return [x][0] + 1

    def changed(x):
        return [x][0] + 2

    assert grade(planted, as_given).line == "○ not attempted"
    assert grade(planted, changed).mark == "✗"


def test_an_error_is_one_line_with_the_learners_own_line():
    def broken(x):
        return x / 0

    line = grade(make(), broken).line
    number = broken.__code__.co_firstlineno + 1
    assert line == (
        f"✗ for x=3: ZeroDivisionError: division by zero, in line {number} of your cell"
    )


def softened(x):
    return torch.softmax(torch.arange(x), dim=0)


def unstored(x):
    return torch.empty(x, device="meta").tolist()


def unwritten(x):
    return torch.nn.Module()(x)


@pytest.mark.parametrize("answer", [softened, unstored, unwritten])
def test_pytorch_raising_not_implemented_is_an_error_of_the_answer(answer):
    verdict = grade(make(), answer)
    number = answer.__code__.co_firstlineno + 1
    assert verdict.line.startswith("✗ for x=3: NotImplementedError: ")
    assert verdict.line.endswith(f", in line {number} of your cell")


def test_an_answer_that_is_left_open_after_some_work_is_not_attempted():
    def begun(x):
        doubled = x + torch.ones(1)
        raise NotImplementedError(f"what now, with {doubled}?")

    assert grade(make(), begun).line == "○ not attempted"


def test_an_error_of_many_lines_stays_one_short_line():
    def loud(x):
        raise ValueError("a\nb" * 500)

    line = grade(make(), loud).line
    assert "\n" not in line
    assert len(line) < 250


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda: 6, "TypeError"),
        (lambda x: None if x else 0, "you gave None, expected 6: does it return"),
        (lambda x: "6", "you gave '6' of type str, expected 6 of type int"),
        (lambda x: math.nan, "you gave nan, not a number, expected 6"),
        (lambda x: [6], "you gave shape (1,), expected 6"),
        (lambda x: True, "you gave True of type bool, expected 6 of type int"),
        (lambda x: sys.exit(3), "SystemExit: 3"),
        (lambda x: (_ for _ in ()).throw(KeyboardInterrupt), "KeyboardInterrupt"),
        (7, "you gave 7 (int): give the function itself"),
    ],
)
def test_answers_of_the_wrong_kind_get_one_line(answer, says):
    line = grade(make(), answer).line

    assert line.startswith("✗")
    assert says in line
    assert "\n" not in line


def test_an_answer_that_fights_back_gets_one_line():
    class Hostile:
        def __eq__(self, other):
            raise RuntimeError("no comparing")

        def __repr__(self):
            raise RuntimeError("no showing")

        __hash__ = None

    exercise = make(stub="x = None", solution=6, cases=(Case(given="", expected=6),))
    assert grade(exercise, Hostile()).mark == "✗"
    assert grade(make(), lambda x: Hostile()).mark == "✗"


def test_an_endless_loop_is_stopped_and_named():
    def endless(x):
        while True:
            pass

    before = threading.active_count()
    line = grade(make(), endless).line
    assert "still running after 0.3 s, stopped" in line
    assert threading.active_count() == before


def test_a_loop_that_swallows_every_exception_is_stopped_as_well():
    def stubborn(x):
        for _ in range(10):
            with contextlib.suppress(BaseException):
                time.sleep(5)

    started = time.monotonic()
    line = grade(make(), stubborn).line
    assert "restart the kernel" in line
    assert time.monotonic() - started < 4


def test_changed_input_is_told_even_if_the_value_is_right():
    exercise = make(
        cases=(Case(given="a list", args=([1, 2],), expected=[2, 1]),),
        solution=lambda xs: xs[::-1],
    )

    def in_place(xs):
        xs.reverse()
        return xs

    assert grade(exercise, in_place).line == (
        "✗ for a list: the value is right, but your function changed its input"
    )
    assert exercise.cases[0].args == ([1, 2],)


def test_tensors_are_compared_as_nested_lists():
    exercise = make(
        cases=(Case(given="ones", args=(torch.ones(2, 2),), expected=[[2, 2], [2, 2]]),)
    )

    assert grade(exercise, lambda x: 2 * x).mark == "✓"
    assert grade(exercise, lambda x: x.new_tensor([[2, 2], [2, 3]])).line == (
        "✗ for ones: you gave 3 at [1, 1], expected 2"
    )
    assert grade(exercise, lambda x: x[0]).line == (
        "✗ for ones: you gave shape (2,), expected shape (2, 2)"
    )


def test_a_prediction_does_not_give_its_answer_away():
    exercise = make(
        kind="predict",
        stub="answer = None",
        solution=2.62,
        cases=(Case(given="", expected=2.62, tolerance=0.1),),
        misconceptions=(Misconception(0.37, "those are the weights alone"),),
        because="twelve bytes more for each two.",
    )

    assert grade(exercise, 0.6).line == "✗ you gave 0.6: too low"
    assert grade(exercise, 0.38).line == (
        "✗ you gave 0.38: too low (those are the weights alone)"
    )
    assert grade(exercise, "much").line == "✗ you gave 'much': a number is asked for"
    assert grade(exercise, 2.6).line == "✓ 1/1 · twelve bytes more for each two."


def test_a_choice_ignores_case_and_spaces():
    exercise = make(
        kind="predict",
        stub="answer = None",
        solution="memory",
        cases=(Case(given="", expected="memory"),),
    )

    assert grade(exercise, " Memory ").mark == "✓"
    assert grade(exercise, "compute").line == "✗ you gave 'compute': not this one"


TARGET = make(
    kind="target",
    stub="size = None",
    solution=70,
    cases=(Case(given="the size", measure=lambda n: n, at_most=80, unit="GiB"),),
    score=Score(of=lambda n: n, unit="GiB"),
)


@pytest.mark.parametrize(
    ("size", "line"),
    [
        (70, "✓ 1/1 · 70 GiB, as the solution"),
        (60, "✓ 1/1 · 60 GiB: you beat the solution (70)"),
        (75, "✓ 1/1 · 75 GiB; the solution reaches 70"),
        (91, "✗ for the size: you reach 91 GiB, the goal is at most 80 GiB"),
        ("x", "✗ for the size: you gave 'x', expected a number"),
        (math.nan, "✗ for the size: you reach nan GiB, the goal is at most 80 GiB"),
    ],
)
def test_a_target_shows_how_far_it_is_and_who_wins(size, line):
    assert grade(TARGET, size).line == line


def test_a_case_needs_exactly_one_rule():
    with pytest.raises(ValueError) as error:
        Case(given="x", expected=1, at_most=2)
    assert str(error.value) == (
        "a case has exactly one of expected, at_most and at_least; 'x' has 2. "
        "Split it in several cases."
    )


def test_work_that_ends_in_time_returns_its_value():
    assert run_within(5, lambda: 41 + 1).value == 42
