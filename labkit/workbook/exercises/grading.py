"""From an answer to a verdict of one line, whatever the answer is."""

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from labkit.workbook.exercises.attempt import is_left_open, is_untouched
from labkit.workbook.exercises.compare import Plain, brief, is_number, plain, same
from labkit.workbook.exercises.complaint import complain, wrong_kind
from labkit.workbook.exercises.sandbox import Ended, run_within
from labkit.workbook.exercises.spec import Case, Exercise, Score

NOT_ATTEMPTED = "○ not attempted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a check found, as one line and as values."""

    mark: Literal["○", "✓", "✗"]
    line: str
    score: float | None = None

    def __repr__(self) -> str:
        return self.line


@dataclass(frozen=True, slots=True)
class Seen:
    """What one case saw of an answer."""

    value: Plain
    has_changed_input: bool = False


def grade(exercise: Exercise, answer: object) -> Verdict:
    """Return the verdict on an answer; never raises, and always ends."""
    try:
        return _grade(exercise, answer)
    except Exception as error:  # an answer may be any object, and break anything
        kind = type(answer).__name__
        line = f"✗ your {kind} cannot be checked: {type(error).__name__}: {error}"
        return Verdict(mark="✗", line=" ".join(line.split()))


def _grade(exercise: Exercise, answer: object) -> Verdict:
    """Return the verdict on an answer that behaves."""
    if is_untouched(answer, exercise.stub):
        return Verdict(mark="○", line=NOT_ATTEMPTED)
    if complaint := wrong_kind(exercise, answer):
        return Verdict(mark="✗", line=f"✗ {complaint}")
    ends: list[Ended] = []
    for case in exercise.cases:
        ends.append(_look(case, answer, exercise.seconds))
        if is_left_open(answer, ends[-1].error):
            return Verdict(mark="○", line=NOT_ATTEMPTED)
        if ends[-1].is_late:
            break  # once is enough to wait
    pairs = zip(exercise.cases, ends, strict=False)
    failed = [(case, ended) for case, ended in pairs if not _passes(case, ended)]
    if not failed:
        return _passed(exercise, answer)
    line = f"✗ {complain(exercise, failed[0][0], answer, failed[0][1])}"
    if message := _recognise(exercise, failed):
        line += f" ({message})"
    return Verdict(mark="✗", line=line)


def _look(case: Case, answer: object, seconds: float) -> Ended:
    """Return how one case ended; its value is a `Seen`."""
    return run_within(seconds, lambda: _observe(case, answer))


def _observe(case: Case, answer: Any) -> Seen:  # noqa: ANN401, answers are anything
    if case.measure is not None:
        return Seen(plain(case.measure(answer)))
    if not callable(answer):
        return Seen(plain(answer))
    args = deepcopy(case.args)
    before = plain(args)
    value = plain(answer(*args))
    return Seen(value, not same(plain(args), before, tolerance=0))


def _passes(case: Case, ended: Ended) -> bool:
    """Return whether the case ended in time, with the right value, input untouched."""
    if ended.is_late or ended.error is not None or ended.value.has_changed_input:
        return False
    value = ended.value.value
    if case.expected is not None:
        return same(value, plain(case.expected), tolerance=case.tolerance)
    if not is_number(value):
        return False
    if case.at_most is not None:
        return value <= case.at_most
    return case.at_least is not None and value >= case.at_least


def _recognise(exercise: Exercise, failed: list[tuple[Case, Ended]]) -> str:
    """Return the message of the known wrong turn that gives what the answer gave."""
    for known in exercise.misconceptions:
        ends = (
            (_look(case, known.answer, exercise.seconds), ended, case.tolerance)
            for case, ended in failed
        )
        if all(_same_end(left, right, tolerance) for left, right, tolerance in ends):
            return known.message
    return ""


def _same_end(left: Ended, right: Ended, tolerance: float) -> bool:
    """Return whether two answers ended a case alike."""
    if left.is_late or right.is_late:
        return left.is_late and right.is_late
    if left.error is not None or right.error is not None:
        return type(left.error) is type(right.error)
    alike = same(left.value.value, right.value.value, tolerance=tolerance)
    return alike and left.value.has_changed_input == right.value.has_changed_input


def _passed(exercise: Exercise, answer: object) -> Verdict:
    """Return the verdict on a right answer, with its score if there is one."""
    line = f"✓ {len(exercise.cases)}/{len(exercise.cases)}"
    value = None
    if exercise.score is not None:
        value, note = _score(exercise, exercise.score, answer)
        line += note
    if exercise.because:
        line += f" · {exercise.because}"
    return Verdict(mark="✓", line=line, score=value)


def _score(
    exercise: Exercise, score: Score, answer: object
) -> tuple[float | None, str]:
    """Return the score of an answer, and what to say of it beside the solution's."""
    ended = run_within(exercise.seconds, lambda: float(score.of(answer)))
    if ended.is_late or ended.error is not None:
        return None, " · it has no score"
    mine, theirs = ended.value, float(score.of(exercise.solution))
    text = f" · {brief(mine)} {score.unit}"
    if math.isclose(mine, theirs):
        return mine, f"{text}, as the solution"
    if (mine < theirs) == score.lower_wins:
        return mine, f"{text}: you beat the solution ({brief(theirs)})"
    return mine, f"{text}; the solution reaches {brief(theirs)}"
