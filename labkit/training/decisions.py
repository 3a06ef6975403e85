"""What a precision scheduler decided in a run, in order, and the file that tells it."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.precision.scheduler import Decision
from labkit.training.run_folder import DECISIONS_NAME


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """A run's return to an earlier state."""

    step: int
    """After which trouble was seen."""

    since: int
    """The first step of the trouble, as far as it is known."""

    back_to: int
    """Steps done in the state that was put back."""

    cause: str

    def __str__(self) -> str:
        return f"step {self.step:>5}  rolled back to step {self.back_to}: {self.cause}"


Entry = Decision | Rollback


class DecisionLog:
    """Decisions and rollbacks of a run, those before a resumption included.

    A file of them may be ahead of the checkpoint from which a run goes on; so it is
    written anew at first.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)
        self.listeners: list[Callable[[tuple[Entry, ...]], None]] = []
        """Each is called with what is new after a step."""
        self._n_told = len(self.entries)
        self._n_written: int | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, Decision))

    @property
    def rollbacks(self) -> tuple[Rollback, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, Rollback))

    def publish(self, folder: Path | None) -> None:
        """Tell the listeners what is new, and write it to the folder of the run.

        One entry a line; without any there is no file.
        """
        if folder is not None:
            self._write(folder / DECISIONS_NAME)
        new, self._n_told = tuple(self.entries[self._n_told :]), len(self.entries)
        for listener in self.listeners if new else ():
            listener(new)

    def _write(self, path: Path) -> None:
        if self._n_written is None:
            self._write_anew(path)
        elif self._n_written < len(self.entries):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(map(_line, self.entries[self._n_written :]))
        self._n_written = len(self.entries)

    def _write_anew(self, path: Path) -> None:
        if not self.entries:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(map(_line, self.entries)), encoding="utf-8")
        os.replace(partial, path)

    def to_values(self) -> list[dict[str, Any]]:
        """Return the entries as plain values."""
        return [asdict(entry) for entry in self.entries]


def from_values(values: dict[str, Any]) -> Entry:
    """Return the entry of a line, or of a checkpoint.

    >>> rollback = Rollback(step=7, since=6, back_to=0, cause="loss is nan")
    >>> from_values(asdict(rollback)) == rollback
    True
    """
    return (Rollback if "back_to" in values else Decision)(**values)


def read_decisions(path: str | Path) -> list[Entry]:
    """Return what `decisions.jsonl` holds, in order; a torn last line is left out."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [from_values(json.loads(line)) for line in lines[:-1]]


def _line(entry: Entry) -> str:
    return json.dumps(asdict(entry)) + "\n"
