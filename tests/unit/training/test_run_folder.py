from pathlib import Path

import pytest

from labkit.training.run_folder import folder_in_use, require_new


def fault(run_dir: Path) -> str:
    with pytest.raises(ValueError) as error:
        require_new(run_dir)
    return str(error.value)


def test_a_folder_that_is_not_there_or_holds_other_things_is_new(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    require_new(tmp_path)
    require_new(tmp_path / "runs" / "a")


def test_a_folder_with_the_records_of_another_run_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert fault(tmp_path) == (
        f"{tmp_path} already holds metrics.jsonl of a run without a checkpoint, to "
        "which a new run would append. Remove the file, or choose another run_dir."
    )


@pytest.mark.parametrize("below", ["", "run", "runs/a"])
def test_a_file_in_the_way_is_named(tmp_path, below):
    (tmp_path / "file").write_text("in the way")
    assert fault(tmp_path / "file" / below) == (
        "run_dir must be a folder, or a place to make one; "
        f"{tmp_path / 'file'} is a file. Choose another run_dir."
    )


def test_a_folder_is_there_while_in_use_and_goes_with_its_parents_if_empty(tmp_path):
    run_dir = tmp_path / "runs" / "a"
    with pytest.raises(RuntimeError), folder_in_use(run_dir):
        assert run_dir.is_dir()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_or_holds_something_stays(tmp_path):
    run_dir = tmp_path / "runs" / "a"
    with folder_in_use(tmp_path):
        pass
    assert tmp_path.is_dir()
    with folder_in_use(run_dir):
        (run_dir / "metrics.jsonl").write_text("{}\n")
    assert (run_dir / "metrics.jsonl").is_file()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    run_dir = tmp_path / "file" / "run"
    with pytest.raises(OSError) as error, folder_in_use(run_dir):
        pass
    assert str(error.value) == (
        f"the folder of the run, {run_dir}, cannot be made: Not a directory. "
        "Nothing was written; choose another run_dir."
    )
