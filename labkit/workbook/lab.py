"""What a cell calls: guess, reveal, compare, settle, progress.

Each puts one output on the page and one line into the test; see `display`.
"""

from collections.abc import Sequence
from html import escape

from ipywidgets import HTML

from labkit.workbook import guess as guesses
from labkit.workbook.claims import settle
from labkit.workbook.display import Shown, line_html, show, varying
from labkit.workbook.exercises.catalogue import exercises_of, modules
from labkit.workbook.guess import Guess
from labkit.workbook.progress import Progress
from labkit.workbook.table import compare

__all__ = ["compare", "guess", "measured", "progress", "reveal", "settle"]


def guess(label: str, *, unit: str = "", choices: Sequence[str] = ()) -> Guess:
    """Show a box for a number, or a list of choices, and return what will be entered.

    Put it before a measurement, and `reveal` after it. Run All goes on without a
    guess.
    """
    box = Guess(label, unit=unit, choices=choices)
    box.show()
    return box


def reveal(
    guess: Guess, value: float | str, *, digits: int = 3, varies: bool = False
) -> Shown:
    """Return the guess set beside the value; it follows when the guess is changed.

    Args:
        guess: what `lab.guess` returned.
        value: in the unit of the guess.
        digits: significant digits, few enough to hold on another machine.
        varies: for timings and readings: the page shows the value, tests do not
            compare it.
    """
    return guesses.reveal(guess, value, digits=digits, varies=varies)


def measured(label: str, value: str) -> Shown:
    """Return one line with a number that differs from run to run."""
    page = line_html(f"{escape(label)}: {varying(value)}", safe=True)
    return Shown(text=f"{label}: (measured)", html=page, varies=True)


def progress() -> Progress:
    """Show which exercises are solved, and return what keeps them.

    `.start()` keeps them on this machine, `.export(path)` copies them, `.reset()`
    forgets them; the table follows.
    """
    kept = Progress()
    live = HTML()

    def update() -> None:
        live.value = _progress_page(kept)

    update()
    kept.when_changed(update)
    text = "Your progress: run this cell to see it."
    show(Shown(text=text, html=line_html(text, tone="quiet"), live=live))
    return kept


def _progress_page(kept: Progress) -> str:
    """Return a table of solved exercises by notebook, or how to keep them."""
    if not kept.is_kept:
        place = escape(str(kept.path))
        how = f"<code>lab.progress().start()</code> keeps them in {place}"
        return line_html(f"Solved exercises are not kept. {how}.", safe=True)
    solved = kept.solved()
    rows = []
    for module in modules():
        names = [exercise.name for exercise in exercises_of(module)]
        marks = " ".join("✓" if name in solved else "○" for name in names)
        done = sum(name in solved for name in names)
        cells = (module[1:], f"{done} of {len(names)}", marks)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>notebook</th><th>solved</th><th>exercises</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
