import os
import signal
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


def test_a_folder_in_use_is_refused_to_another_run_until_it_is_let_go(tmp_path):
    with folder_in_use(tmp_path):
        with pytest.raises(ValueError) as error, folder_in_use(tmp_path):
            pass
        assert str(error.value) == (
            f"another run is writing to {tmp_path}, and two would destroy each "
            "other's checkpoint. Wait for its end, or choose another run_dir."
        )
    with folder_in_use(tmp_path):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_lets_go_of_its_folder(tmp_path):
    process = os.fork()
    if not process:
        with folder_in_use(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    with folder_in_use(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_new_run_is_refused_if_another_began_since_it_was_made(tmp_path):
    (tmp_path / "checkpoint.safetensors").touch()
    with (
        pytest.raises(ValueError, match="already holds a checkpoint"),
        folder_in_use(tmp_path, is_new=True),
    ):
        pass


def test_a_failing_disk_leaves_no_records_without_a_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(OSError), folder_in_use(run_dir, is_new=True):
        (run_dir / "metrics.jsonl").write_text("{}\n")
        raise OSError
    assert not run_dir.exists()


def test_a_failing_disk_leaves_the_records_beside_a_checkpoint(tmp_path):
    with pytest.raises(OSError), folder_in_use(tmp_path, is_new=True):
        for name in ("metrics.jsonl", "checkpoint.safetensors"):
            (tmp_path / name).touch()
        raise OSError
    assert (tmp_path / "metrics.jsonl").exists()


def test_a_run_whose_checkpoint_has_no_room_is_refused_at_its_start(tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(OSError) as error, folder_in_use(run_dir, n_bytes=10**18):
        pass
    assert str(error.value).startswith(
        f"a checkpoint of this run takes 1000000000000 MB, and where {run_dir} is, "
    )
    assert str(error.value).endswith(
        " MB are free. Nothing was written; free some space or choose another run_dir."
    )
    assert not run_dir.exists()


def test_a_name_that_no_folder_can_have_is_one_sentence(tmp_path):
    run_dir = tmp_path / ("x" * 300)
    assert fault(run_dir) == (
        "run_dir must be a folder, or a place to make one: File name too long: "
        f"{run_dir}. Choose another run_dir."
    )


def test_a_new_run_hears_of_the_run_in_its_folder_before_that_runs_records(tmp_path):
    with folder_in_use(tmp_path):
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        assert fault(tmp_path).startswith(f"another run is writing to {tmp_path}, ")
    assert fault(tmp_path).startswith(f"{tmp_path} already holds metrics.jsonl")
