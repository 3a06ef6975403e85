"""Which exercises a learner has solved, kept only if they ask for it.

The file is the consent: nothing is written until `start` has made it. It lies beside
the token files of the corpus, so that it outlives an installation.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from labkit.data import cache_folder
from labkit.workbook.display import show_line

FILE = "progress.json"


class Progress:
    """Solved exercises and best scores, in one small file on this machine."""

    def __init__(self, path: str | Path | None = None) -> None:
        """Use the file at `path`, or the one in the user's cache folder."""
        self.path = Path(path) if path else cache_folder() / FILE
        self._followers: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        if not self.is_kept:
            return "Progress: not kept"
        return f"Progress: {len(self.solved())} solved, kept in {self.path}"

    @property
    def is_kept(self) -> bool:
        """Whether the learner has asked for progress to be kept."""
        return self.path.exists()

    def _ipython_display_(self) -> None:
        """Show nothing: `lab.progress` puts the table on the page."""

    def when_changed(self, callback: Callable[[], None]) -> None:
        """Call back whenever this object has changed the file."""
        self._followers.append(callback)

    def start(self) -> None:
        """Keep progress from now on, and say so; what is kept already stays."""
        if not self.is_kept:
            self._write({})
        n_solved = len(self.solved())
        show_line(f"Solved exercises are kept in {self.path}: {n_solved} so far.")

    def reset(self) -> None:
        """Forget all, keep nothing from now on, and say so."""
        self.path.unlink(missing_ok=True)
        self._tell()
        show_line("Solved exercises are forgotten, and no longer kept.")

    def export(self, path: str | Path) -> None:
        """Copy what is kept to a file of your own, and say so."""
        solved = self.solved()
        text = json.dumps(solved, indent=2, sort_keys=True)
        Path(path).write_text(text + "\n", encoding="utf-8")
        show_line(f"Copied to {path}: {len(solved)} solved.")

    def solved(self) -> dict[str, float | None]:
        """Return the best score by the name of each solved exercise, None without one.

        Raises:
            ValueError: the file is not what this class wrote.
        """
        if not self.is_kept:
            return {}
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            kept = None
        if not isinstance(kept, dict):
            raise ValueError(
                f"the progress file must hold one JSON object; {self.path} does not. "
                "Delete it, or call lab.progress().reset()."
            )
        return kept

    def note(
        self, name: str, *, score: float | None = None, lower_wins: bool = True
    ) -> None:
        """Note a solved exercise, and its score if it is the best so far."""
        if not self.is_kept:
            return
        solved = self.solved()
        before = solved.get(name)
        if before is not None and score is not None:
            score = min(before, score) if lower_wins else max(before, score)
        solved[name] = before if score is None else score
        self._write(solved)

    def _write(self, solved: dict[str, float | None]) -> None:
        """Write to a file beside it, then move: an interrupt loses nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(solved, indent=2, sort_keys=True), encoding="utf-8")
        os.replace(draft, self.path)
        self._tell()

    def _tell(self) -> None:
        for callback in self._followers:
            callback()
