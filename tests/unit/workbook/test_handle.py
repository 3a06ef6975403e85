"""What an exercise puts on the page."""

import pytest

from labkit.workbook import exercise, lab
from labkit.workbook.exercises import find
from labkit.workbook.exercises.handle import solution_text
from labkit.workbook.progress import Progress


@pytest.fixture
def ex(tmp_path, capsys):
    return exercise("gibibytes", progress=Progress(tmp_path / "progress.json"))


def test_the_task_is_announced_in_one_line(ex, capsys):
    assert capsys.readouterr().out == (
        "Exercise: GB or GiB? · Write the function · difficulty 1 of 3 · 2 min\n"
    )


def test_a_check_is_one_line(ex, capsys):
    capsys.readouterr()
    assert ex.check(lambda n_bytes: n_bytes / 1e9) is None
    assert capsys.readouterr().out == (
        "✗ for 1,073,741,824 bytes: you gave 1.07374, expected 1 "
        "(that is GB: GiB count 1024³)\n"
    )


def test_a_guess_can_be_checked_as_an_answer(tmp_path, capsys):
    ex = exercise("read_the_weights", progress=Progress(tmp_path / "progress.json"))
    guess = lab.guess("time to read the weights", unit="ms")
    capsys.readouterr()
    ex.check(guess)
    guess.enter("22")
    ex.check(guess)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "○ not attempted"
    assert lines[1].startswith("✓ 1/1")


def test_hints_come_one_by_one_and_end(ex, capsys):
    capsys.readouterr()
    for _ in range(3):
        ex.hint()

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Hint 1 of 2: One KiB is 1024 bytes")
    assert lines[1] == "Hint 2 of 2: 1024³ is `2**30`."
    assert lines[2] == "That was the last hint: .solution() shows the answer."


def test_a_solution_from_the_library_is_shown_with_its_home():
    title, source = solution_text(find("mla_params"))

    assert title == "From the library, `labkit.config.counts`:"
    assert source.startswith("def attention_params(")


def test_a_solution_that_is_a_value_is_shown_as_python():
    assert solution_text(find("cache_of_a_batch")) == ("A solution:", "8.15")


def test_an_unknown_exercise_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="no exercise is named 'gib'.*gibibytes"):
        exercise("gib")
