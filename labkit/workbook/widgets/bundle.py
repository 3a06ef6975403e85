"""One bundle: controls, a status line and a figure that follow them.

No Output widget and no print: what is stored is the same in JupyterLab, nbclient and
nbval. A reader without a kernel sees the figure at its starting values.
"""

from collections.abc import Callable
from html import escape
from typing import Any

from ipywidgets import HTML, ValueWidget, VBox
from matplotlib.figure import Figure

from labkit.workbook.display import Shown, line_html, show
from labkit.workbook.figures.export import LIVE_SCALE, figure_html, image_html, png
from labkit.workbook.figures.style import WIDTH
from labkit.workbook.widgets.controls import row

STATIC_NOTE = "Static view: run the cell to move the controls."


def explore(
    draw: Callable[..., Figure],
    describe: Callable[..., str],
    *,
    caption: str,
    draw_static: Callable[..., Figure] | None = None,
    **controls: ValueWidget,
) -> None:
    """Show controls whose values `draw` and `describe` turn into figure and sentence.

    Args:
        draw: a pure function of the controls' values, by name; quick, as it runs at
            each move.
        describe: the same values as one sentence with the numbers that matter. It is
            the status line, the alt text, and the line that tests compare.
        caption: what the figure shows, and what to try.
        draw_static: draws the figure of a page without controls, where these show what
            `draw` leaves out; None is `draw`.
        **controls: from `controls`, by the name of the argument they set.
    """
    view = View()

    def values() -> dict[str, Any]:
        return {name: control.value for name, control in controls.items()}

    def redraw(_: object = None) -> None:
        try:
            chosen = values()
            view.update(draw(**chosen), describe(**chosen))
        except Exception as error:  # in a callback an exception would be lost
            view.fail(error)

    start = values()
    text = describe(**start)
    fig = draw(**start)  # outside `redraw`: a broken figure fails its cell
    view.update(fig, text)
    for control in controls.values():
        control.observe(redraw, "value")
    note = HTML(line_html(caption))
    box = VBox([*map(row, controls.values()), view.status, view.image, note])
    box.add_class("labkit-explore")
    still = fig if draw_static is None else draw_static(**start)
    page = figure_html(still, alt=text, caption=f"{caption} {STATIC_NOTE}")
    show(Shown(text=text, html=page, live=box))


class View:
    """A status line above an image, both updated in place and read aloud."""

    def __init__(self) -> None:
        self.status = HTML()
        self.image = HTML()

    def say(self, text: str) -> None:
        """Put a sentence into the status line."""
        self.status.value = (
            '<p role="status" aria-live="polite" '
            f'style="margin:4px 0;font-weight:600">{escape(text)}</p>'
        )

    def update(self, fig: Figure, text: str) -> None:
        """Show a figure and the sentence that says what it shows."""
        self.say(text)
        data = png(fig, scale=LIVE_SCALE, palette=False)
        self.image.value = image_html(data, alt=text, width=WIDTH)

    def fail(self, error: Exception) -> None:
        """Say what went wrong, and that the figure is still the last good one.

        A ValueError says the rule and the fix; its kind would tell a reader nothing.
        """
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        self.say(f"✗ {kind}{error} (the figure has not changed)")
