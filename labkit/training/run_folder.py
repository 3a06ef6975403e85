"""The folder of a run: what it may hold before, and that none is left behind empty."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labkit.training.checkpoint import CHECKPOINT_NAME

METRICS_NAME = "metrics.jsonl"


def require_new(run_dir: Path) -> None:
    """Raise ValueError unless a new run may write to this folder, which need not be."""
    present = next(filter(Path.exists, (run_dir, *run_dir.parents)), None)
    if present is not None and not present.is_dir():
        raise ValueError(
            f"run_dir must be a folder, or a place to make one; {present} is a file. "
            "Choose another run_dir."
        )
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


@contextmanager
def folder_in_use(run_dir: Path | None) -> Iterator[None]:
    """Make the folder; at the end, remove what of it was made and is still empty."""
    if run_dir is None:
        yield
        return
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        _make(run_dir)
        yield
    finally:
        for folder in made:
            with suppress(OSError):  # it holds something, or was never made
                folder.rmdir()


def _make(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the folder of the run, {run_dir}, cannot be made: {error.strerror}. "
            "Nothing was written; choose another run_dir."
        ) from error
