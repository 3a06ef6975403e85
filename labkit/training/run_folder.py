"""The folder of a run: what it may hold before, who uses it, what is left behind."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from labkit.monitor import Monitor
from labkit.training.checkpoint import CHECKPOINT_NAME
from labkit.training.ranks import Ranks

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

METRICS_NAME = "metrics.jsonl"
DECISIONS_NAME = "decisions.jsonl"


def monitor_in(run_dir: Path | None, ranks: Ranks) -> Monitor:
    """Return a monitor that writes records to the folder, if there is one."""
    has_file = run_dir is not None and ranks.is_first
    return Monitor(run_dir / METRICS_NAME if has_file else None)


def place_of(path: str | Path | None, run_dir: Path | None) -> Path:
    """Return where a checkpoint goes: to the path, or else to the folder of the run."""
    if path is not None:
        return Path(path)
    if run_dir is None:
        raise ValueError(
            "there is no place to save to: the Trainer has no run_dir. "
            "Give save a path, or the Trainer a run_dir."
        )
    return run_dir / CHECKPOINT_NAME


def require_new(run_dir: Path) -> None:
    """Raise ValueError unless a new run may write to this folder, which need not be."""
    _require_name(run_dir)
    present = next(filter(Path.exists, (run_dir, *run_dir.parents)), None)
    if present is not None and not present.is_dir():
        raise ValueError(
            f"run_dir must be a folder, or a place to make one; {present} is a file. "
            "Choose another run_dir."
        )
    if run_dir.is_dir():
        with _held(run_dir):  # asks whether anyone else does
            pass
    _require_no_run(run_dir)


def _require_no_run(run_dir: Path) -> None:
    if (run_dir / CHECKPOINT_NAME).exists():
        raise ValueError(
            f"{run_dir} already holds a checkpoint, which a new run would replace. "
            f"Go on with Trainer.resume({str(run_dir)!r}), or choose another run_dir."
        )
    if (run_dir / METRICS_NAME).exists():
        raise ValueError(
            f"{run_dir} already holds {METRICS_NAME} of a run without a checkpoint, "
            "to which a new run would append. "
            "Remove the file, or choose another run_dir."
        )


def _require_name(run_dir: Path) -> None:
    """Raise ValueError if the system takes no file of this name."""
    try:
        (run_dir / CHECKPOINT_NAME).exists()
    except OSError as error:
        raise ValueError(
            f"run_dir must be a folder, or a place to make one: {error.strerror}: "
            f"{run_dir}. Choose another run_dir."
        ) from error


@contextmanager
def folder_in_use(
    run_dir: Path | None, *, is_new: bool = False, n_bytes: int = 0
) -> Iterator[None]:
    """Make the folder and hold it, so that no other run writes to it meanwhile.

    At the end, what of the folder was made and is still empty is removed. So are
    the records of a new run that a failing disk left without a checkpoint: it can
    be started again.

    Args:
        run_dir: the folder; None uses none.
        is_new: whether the folder must still hold no run.
        n_bytes: size of the checkpoint for which there must be room.
    """
    if run_dir is None:
        yield
        return
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        _make(run_dir)
        with _held(run_dir):
            if is_new:
                _require_no_run(run_dir)
            _require_room(run_dir, n_bytes)
            with _all_or_nothing(run_dir) if is_new else nullcontext():
                yield
    finally:
        for folder in made:
            with suppress(OSError):  # it holds something, or was never made
                folder.rmdir()


@contextmanager
def _held(run_dir: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder, which ends with the process at the latest.

    Where the system or the file system has no such locks, nothing is held.

    Raises:
        ValueError: someone else holds it.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        with suppress(OSError):
            _lock(descriptor, run_dir)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, run_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another run is writing to {run_dir}, and two would destroy each other's "
            "checkpoint. Wait for its end, or choose another run_dir."
        ) from None


def _require_room(run_dir: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(run_dir).free
    if free < n_bytes:
        raise OSError(
            f"a checkpoint of this run takes {-(-n_bytes // 10**6)} MB, and where "
            f"{run_dir} is, {free // 10**6} MB are free. Nothing was written; free "
            "some space or choose another run_dir."
        )


@contextmanager
def _all_or_nothing(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        if not (run_dir / CHECKPOINT_NAME).exists():
            for name in (METRICS_NAME, DECISIONS_NAME):
                (run_dir / name).unlink(missing_ok=True)
        raise


def _make(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the folder of the run, {run_dir}, cannot be made: {error.strerror}. "
            "Nothing was written; choose another run_dir."
        ) from error
