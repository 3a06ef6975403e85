"""What a notebook holds of an exercise: show, check, hint, solution."""

import inspect
import re
from html import escape
from typing import Any

from labkit.config import ModelConfig
from labkit.workbook.display import Shown, line_html, show, show_line
from labkit.workbook.exercises.catalogue import find
from labkit.workbook.exercises.config_code import config_code
from labkit.workbook.exercises.grading import grade
from labkit.workbook.exercises.spec import KINDS, Exercise
from labkit.workbook.guess import Guess
from labkit.workbook.progress import Progress

TONES = {"✓": "good", "✗": "bad", "○": "quiet"}


def exercise(name: str, *, progress: Progress | None = None) -> "Handle":
    """Show the task of an exercise, and return what checks answers to it.

    Args:
        name: as in `labkit/workbook/exercises/`.
        progress: where solved exercises are noted, if the learner asked for it.
    """
    handle = Handle(find(name), progress or Progress())
    handle.show()
    return handle


class Handle:
    """An exercise on a page. It keeps count of the hints that were given."""

    def __init__(self, spec: Exercise, progress: Progress) -> None:
        self.spec = spec
        self._progress = progress
        self._n_hints_given = 0

    def __repr__(self) -> str:
        return f"exercise {self.spec.name!r}: .check(answer), .hint(), .solution()"

    def _ipython_display_(self) -> None:
        """Show nothing: the task is already on the page."""

    def show(self) -> None:
        """Show the task."""
        spec = self.spec
        stars = "★" * spec.difficulty + "☆" * (3 - spec.difficulty)
        text = (
            f"Exercise: {spec.title} · {KINDS[spec.kind]} · difficulty "
            f"{spec.difficulty} of 3 · {spec.minutes} min"
        )
        head = (
            f"<strong>Exercise: {escape(spec.title)}</strong> · {KINDS[spec.kind]} · "
            f'<span title="difficulty {spec.difficulty} of 3">{stars}</span> · '
            f"{spec.minutes} min"
        )
        task = _code_marks(spec.task)
        page = (
            '<div style="border-left:4px solid #0072B2;padding-left:10px">'
            f'<p style="margin:4px 0">{head}</p><p style="margin:4px 0">{task}</p>'
            "</div>"
        )
        show(Shown(text=text, html=page))

    def check(self, answer: Any) -> None:  # noqa: ANN401, answers are anything
        """Show the verdict on an answer in one line; never raises."""
        if isinstance(answer, Guess):
            answer = answer.value
        verdict = grade(self.spec, answer)
        show_line(verdict.line, tone=TONES[verdict.mark])
        if verdict.mark == "✓":
            self._note_progress(verdict.score)

    def _note_progress(self, score: float | None) -> None:
        """Note the solved exercise if the learner keeps progress."""
        rule = self.spec.score
        lower_wins = rule.lower_wins if rule else True
        try:
            self._progress.note(self.spec.name, score=score, lower_wins=lower_wins)
        except (OSError, ValueError) as error:
            show_line(f"Progress was not noted: {error}", tone="bad")

    def hint(self) -> None:
        """Show the next hint."""
        hints = self.spec.hints
        if self._n_hints_given == len(hints):
            show_line("That was the last hint: .solution() shows the answer.")
            return
        self._n_hints_given += 1
        text = f"Hint {self._n_hints_given} of {len(hints)}: "
        hint = hints[self._n_hints_given - 1]
        page = line_html(escape(text) + _code_marks(hint), tone="quiet", safe=True)
        show(Shown(text=text + hint, html=page))

    def solution(self) -> None:
        """Show an answer that passes: the library's own function where one exists."""
        title, source = solution_text(self.spec)
        text = f"{title}\n{source}" + (
            f"\n{self.spec.because}" * bool(self.spec.because)
        )
        page = (
            f'<p style="margin:4px 0">{_code_marks(title)}</p>'
            f"<pre>{escape(source)}</pre><p>{_code_marks(self.spec.because)}</p>"
        )
        show(Shown(text=text, html=page))


def solution_text(spec: Exercise) -> tuple[str, str]:
    """Return where a solution comes from, and its source."""
    answer = spec.solution
    if isinstance(answer, ModelConfig):
        return "A solution:", config_code(answer)
    if not spec.wants_function:
        return "A solution:", repr(answer)
    function = inspect.unwrap(answer)
    source = inspect.getsource(function).rstrip()
    if ".exercises." in function.__module__:
        return "A solution:", source
    return f"From the library, `{function.__module__}`:", source


def _code_marks(text: str) -> str:
    """Return text as HTML, with code between backticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
