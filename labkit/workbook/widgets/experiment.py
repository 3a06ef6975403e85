"""Work that takes a while: started by a button, shown as it grows, stopped at will."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ipywidgets import HTML, Button, FloatProgress, HBox, ValueWidget, VBox
from matplotlib.figure import Figure

from labkit.workbook.display import Shown, line_html, show
from labkit.workbook.widgets.bundle import View
from labkit.workbook.widgets.controls import row

MIN_SECONDS = 0.5
"""Least time between two drawings while work goes on."""

MAX_SHARE = 0.05
"""Most of the time that drawing may take from the work."""


class Throttle:
    """Says when it is time to draw again: at most twice a second, and cheaply."""

    def __init__(self) -> None:
        self._next = 0.0

    def is_due(self) -> bool:
        """Return whether enough time has passed."""
        return time.monotonic() >= self._next

    def spent(self, seconds: float) -> None:
        """Note what the last drawing took, and wait in proportion."""
        self._next = time.monotonic() + max(MIN_SECONDS, seconds / MAX_SHARE)


def experiment(
    work: Callable[..., Iterator[tuple[float, Any]]],
    draw: Callable[[Any], Figure],
    describe: Callable[[Any], str],
    *,
    caption: str,
    **controls: ValueWidget,
) -> None:
    """Show controls and a button that starts `work` with their values.

    The work runs beside the kernel's own thread, so that Stop answers and other cells
    can run. Stopping keeps the last result.

    Args:
        work: a generator of (share done, result so far), from the controls' values by
            name. It is closed when stopped, so `finally` cleans up.
        draw: turns a result into a figure.
        describe: turns a result into one sentence.
        caption: what is done, how long it takes, and what to look for.
        **controls: from `controls`, by the name of the argument they set.
    """
    bench = Bench(work, draw, describe, controls)
    bench.box.children = (HTML(line_html(caption)), *bench.box.children)
    text = f"Experiment: {caption}"
    page = line_html(f"{text} Run the cell to start it.", tone="quiet")
    show(Shown(text=text, html=page, live=bench.box))


class Bench:
    """The parts of an experiment on the page, and the thread it runs in."""

    def __init__(
        self,
        work: Callable[..., Iterator[tuple[float, Any]]],
        draw: Callable[[Any], Figure],
        describe: Callable[[Any], str],
        controls: dict[str, ValueWidget],
    ) -> None:
        self._work, self._draw, self._describe = work, draw, describe
        self._controls = controls
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._throttle = Throttle()
        self.view = View()
        self.progress = FloatProgress(0.0, min=0.0, max=1.0, description="done")
        self.run_button = Button(description="Run", button_style="primary")
        self.stop_button = Button(description="Stop", disabled=True)
        self.run_button.on_click(lambda _: self.start())
        self.stop_button.on_click(lambda _: self.stop())
        buttons = HBox([self.run_button, self.stop_button, self.progress])
        rows = [
            *map(row, controls.values()),
            buttons,
            self.view.status,
            self.view.image,
        ]
        self.box = VBox(rows)
        self.box.add_class("labkit-experiment")
        self.view.say("Not run yet.")

    def start(self) -> None:
        """Start the work with the controls' present values."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._is_stopped.clear()
        self._show_running(True)
        values = {name: control.value for name, control in self._controls.items()}
        self._thread = threading.Thread(
            target=self._run, args=(values,), name="experiment", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ask the work to end at its next step."""
        self._is_stopped.set()

    def wait(self, seconds: float) -> None:
        """Wait for the work to end."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, values: dict[str, Any]) -> None:
        """Do the work, step by step; whatever happens, leave the page usable."""
        try:
            self._follow(self._work(**values))
        except Exception as error:  # in a thread an exception would be lost
            self.view.fail(error)
        finally:
            self._show_running(False)

    def _follow(self, steps: Iterator[tuple[float, Any]]) -> None:
        """Show results as they come, and the last one whatever the throttle says."""
        result, is_drawn = None, True
        for share, result in steps:
            self.progress.value = share
            is_drawn = self._throttle.is_due()
            if is_drawn:
                self._show(result)
            if self._is_stopped.is_set():
                getattr(steps, "close", lambda: None)()
                break
        if result is None:
            self.view.say("The work gave no result.")
        elif not is_drawn or self._is_stopped.is_set():
            self._show(result, "stopped: " if self._is_stopped.is_set() else "")

    def _show(self, result: object, prefix: str = "") -> None:
        start = time.monotonic()
        self.view.update(self._draw(result), prefix + self._describe(result))
        self._throttle.spent(time.monotonic() - start)

    def _show_running(self, is_running: bool) -> None:
        self.run_button.disabled = is_running
        self.stop_button.disabled = not is_running
