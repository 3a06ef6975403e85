"""Progress is kept only on request, in one file, and never lost."""

import json

import pytest

from labkit.data import cache_folder
from labkit.workbook import exercise
from labkit.workbook.progress import Progress


@pytest.fixture
def progress(tmp_path):
    return Progress(tmp_path / "folder" / "progress.json")


def test_nothing_is_written_until_asked(progress):
    progress.note("double")

    assert not progress.path.parent.exists()
    assert repr(progress) == "Progress: not kept"


def test_a_solved_exercise_is_noted_with_its_best_score(progress):
    progress.start()
    progress.note("fit", score=70.0)
    progress.note("fit", score=75.0)
    progress.note("speed", score=2.0, lower_wins=False)
    progress.note("speed", score=3.0, lower_wins=False)
    progress.note("double")

    assert progress.solved() == {"double": None, "fit": 70.0, "speed": 3.0}


def test_progress_outlives_an_installation():
    assert Progress().path == cache_folder() / "progress.json"


def test_starting_again_keeps_what_is_there(progress):
    progress.start()
    progress.note("double")
    progress.start()

    assert progress.solved() == {"double": None}


def test_export_and_reset(progress, tmp_path, capsys):
    progress.start()
    progress.note("double")
    progress.export(tmp_path / "mine.json")
    progress.reset()

    assert capsys.readouterr().out.splitlines() == [
        f"Solved exercises are kept in {progress.path}: 0 so far.",
        f"Copied to {tmp_path / 'mine.json'}: 1 solved.",
        "Solved exercises are forgotten, and no longer kept.",
    ]
    assert json.loads((tmp_path / "mine.json").read_text()) == {"double": None}
    assert not progress.is_kept
    assert progress.solved() == {}


def test_a_damaged_file_is_named_with_the_remedy(progress):
    progress.start()
    progress.path.write_text("{", encoding="utf-8")

    with pytest.raises(ValueError, match="must hold one JSON object.*Delete it"):
        progress.solved()


def test_a_check_notes_what_it_passes_and_nothing_else(progress, capsys):
    progress.start()
    ex = exercise("gibibytes", progress=progress)
    ex.check(lambda n_bytes: n_bytes / 1e9)
    assert progress.solved() == {}
    ex.check(ex.spec.solution)
    assert progress.solved() == {"gibibytes": None}


def test_a_check_never_raises_over_a_damaged_file(progress, capsys):
    progress.start()
    progress.path.write_text("[]", encoding="utf-8")
    ex = exercise("gibibytes", progress=progress)
    ex.check(ex.spec.solution)

    assert "Progress was not noted" in capsys.readouterr().out
