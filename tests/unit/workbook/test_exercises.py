"""Every exercise of the book: its solution, its stub, its known wrong turns."""

import ast
import re
from pathlib import Path

import pytest

from labkit.config import PRESETS
from labkit.workbook.exercises import all_exercises, catalogue, exercises_of, grade
from labkit.workbook.exercises.catalogue import modules
from labkit.workbook.exercises.compare import brief, is_number
from labkit.workbook.exercises.handle import solution_text

EXERCISES = list(all_exercises())
WRONG_TURNS = [
    pytest.param(exercise, known, id=f"{exercise.name}-{number}")
    for exercise in EXERCISES
    for number, known in enumerate(exercise.misconceptions)
]


def by_name(exercise):
    return exercise.name


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_name)
def test_the_solution_passes(exercise):
    verdict = grade(exercise, exercise.solution)

    assert verdict.line.startswith(f"✓ {len(exercise.cases)}/{len(exercise.cases)}")


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_name)
def test_an_untouched_stub_counts_as_not_attempted(exercise):
    namespace = {"PRESETS": PRESETS}
    exec(exercise.stub, namespace)
    answer = list(namespace.values())[-1]  # the last name that the cell binds

    assert callable(answer) == exercise.wants_function
    assert grade(exercise, answer).line == "○ not attempted"


@pytest.mark.parametrize(("exercise", "known"), WRONG_TURNS)
def test_each_misconception_fails_with_its_own_message(exercise, known):
    verdict = grade(exercise, known.answer)

    assert verdict.mark == "✗"
    assert verdict.line.endswith(f"({known.message})")


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_name)
def test_an_exercise_has_what_teaching_needs(exercise):
    messages = [known.message for known in exercise.misconceptions]

    assert len(messages) >= 2
    assert len(set(messages)) == len(messages)
    assert len(exercise.hints) >= 2
    assert exercise.cases
    assert exercise.difficulty in (1, 2, 3)
    assert 1 <= exercise.minutes <= 30
    assert solution_text(exercise)[1]


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_name)
def test_every_sentence_of_a_check_fits_one_line(exercise):
    texts = [exercise.task, exercise.because, *exercise.hints, exercise.title]
    texts += [known.message for known in exercise.misconceptions]

    assert not any("\n" in text for text in texts)


def targets():
    """Return the exercises that want a number which reaches a bound."""
    found = (each for each in EXERCISES if each.kind == "target")
    return [each for each in found if is_number(each.solution)]


@pytest.mark.parametrize("exercise", targets(), ids=by_name)
@pytest.mark.parametrize("factor", [3, 0.3])
def test_a_missed_target_does_not_give_the_answer_away(exercise, factor):
    line = grade(exercise, type(exercise.solution)(factor * exercise.solution)).line

    assert not re.search(rf"\b{re.escape(brief(exercise.solution))}\b", line)


def test_too_many_rows_are_told_only_that_fewer_suffice():
    (exercise,) = (each for each in EXERCISES if each.name == "enough_rows")

    assert grade(exercise, 400).line == (
        "✗ for the number of tokens: 400 tokens are compute-bound, but fewer suffice"
    )


def test_names_are_unique_over_the_whole_book():
    names = [exercise.name for exercise in EXERCISES]

    assert len(set(names)) == len(names)


@pytest.mark.parametrize("module", modules())
def test_a_notebook_has_three_exercises_of_at_least_two_kinds(module):
    exercises = exercises_of(module)

    assert len(exercises) >= 3
    assert len({exercise.kind for exercise in exercises}) >= 2


@pytest.mark.parametrize("module", modules())
def test_right_values_are_written_by_hand_not_taken_from_the_solution(module):
    source = (Path(catalogue.__file__).parent / f"{module}.py").read_text("utf-8")
    rules = [
        keyword.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Case"
        for keyword in node.keywords
        if keyword.arg in ("expected", "at_most", "at_least")
    ]

    assert len(rules) == sum(len(each.cases) for each in exercises_of(module))
    for rule in rules:
        ast.literal_eval(rule)  # raises unless it is a literal
