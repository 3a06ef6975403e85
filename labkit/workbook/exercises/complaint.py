"""What a check says about a case that failed, in one line."""

import inspect
import traceback

from labkit.workbook.exercises.attempt import code_of
from labkit.workbook.exercises.compare import (
    Plain,
    brief,
    difference,
    is_number,
    plain,
    same,
)
from labkit.workbook.exercises.sandbox import Ended
from labkit.workbook.exercises.spec import Case, Exercise

MAX_ERROR = 160
"""Letters of an error's text that are shown."""


def wrong_kind(exercise: Exercise, answer: object) -> str:
    """Return what is wrong with the kind of thing that was given, or ""."""
    if exercise.wants_function and not callable(answer):
        kind = type(answer).__name__
        return f"you gave {brief(answer)} ({kind}): give the function itself"
    if not exercise.wants_function and inspect.isroutine(answer):
        return f"you gave {brief(answer)}: call it, and give what it returns"
    return ""


def complain(exercise: Exercise, case: Case, answer: object, ended: Ended) -> str:
    """Return what went wrong in one case."""
    about = f"for {case.given}: " if case.given else ""
    if ended.is_late:
        return about + _too_long(exercise.seconds, is_running=ended.is_running)
    if ended.error is not None:
        return about + _spell_error(answer, ended.error)
    value, unit = ended.value.value, f" {case.unit}".rstrip()
    if case.expected is None:
        return about + _out_of_bounds(case, value, unit)
    expected = plain(case.expected)
    if same(value, expected, tolerance=case.tolerance):
        return f"{about}the value is right, but your function changed its input"
    if exercise.kind == "predict":
        return about + _direction(value, expected)
    return about + difference(value, expected, tolerance=case.tolerance) + unit


def _too_long(seconds: float, *, is_running: bool) -> str:
    end = "stopped; is there a loop without an end?"
    if is_running:
        end = "and it cannot be stopped: restart the kernel"
    return f"still running after {seconds:g} s, {end}"


def _out_of_bounds(case: Case, value: Plain, unit: str) -> str:
    """Return how far a value is from the goal."""
    if not is_number(value):
        return f"you gave {brief(value)}, expected a number"
    if case.otherwise:
        return f"{brief(value)}{unit} {case.otherwise}"
    bound = case.at_least if case.at_most is None else case.at_most
    word = "least" if case.at_most is None else "most"
    return f"you reach {brief(value)}{unit}, the goal is at {word} {bound:g}{unit}"


def _direction(value: Plain, expected: Plain) -> str:
    """Return how a prediction is off, without giving the answer away."""
    if is_number(value) and is_number(expected) and value == value:
        return f"you gave {brief(value)}: too {'high' if value > expected else 'low'}"
    if is_number(expected):
        return f"you gave {brief(value)}: a number is asked for"
    return f"you gave {brief(value)}: not this one"


def _spell_error(answer: object, error: BaseException) -> str:
    """Return the error in one line, with the line of the learner's own code."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = " ".join(text.split())
    text = text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 1] + "…"
    code = code_of(answer)
    own = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if code is not None and frame.filename == code.co_filename
    ]
    return f"{text}, in line {own[-1]} of your cell" if own else text
