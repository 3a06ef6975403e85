"""A loss curve that grows while a model trains, with a button that ends the run.

The cell awaits the run: between two steps the kernel hears the Stop button. The
kernel's own interrupt does the same. Either way the run ends after a whole step, and
what was learned is kept.
"""

import asyncio
import time
from collections.abc import Sequence

from ipywidgets import Button, HBox, IntProgress, VBox
from matplotlib.figure import Figure

from labkit.monitor import StepMetrics
from labkit.training import Trainer
from labkit.training.interrupt import held_interrupt
from labkit.workbook.display import Shown, show
from labkit.workbook.figures.export import figure_html
from labkit.workbook.figures.style import SERIES, canvas
from labkit.workbook.widgets.bundle import View
from labkit.workbook.widgets.experiment import Throttle

BREATH_SECONDS = 0.002
"""Pause after each step in which the kernel reads what the page sent."""


async def live_training(
    trainer: Trainer, n_steps: int, *, caption: str = ""
) -> list[StepMetrics]:
    """Train, show the loss as it falls, and return the records of the steps done.

    In a cell: `records = await live_training(trainer, 300)`. A run that was stopped
    has fewer records; the model keeps its state, and calling again goes on. With a
    `run_dir` the end of the run is saved, however it came.

    Args:
        trainer: trains from where it is.
        n_steps: steps to do.
        caption: what is trained on what.
    """
    view = TrainingView(n_steps)
    show(Shown(text=f"Training for {n_steps:,} steps", live=view.box))
    records: list[StepMetrics] = []
    try:
        with held_interrupt() as is_interrupted:
            while len(records) < n_steps and not (view.is_stopped or is_interrupted()):
                records.append(trainer.step())
                view.record(records[-1])
                await asyncio.sleep(BREATH_SECONDS)
    finally:
        view.close()
    if trainer.run_dir is not None:
        trainer.save()
    show(summary(records, n_steps, caption=caption))
    return records


def loss_curve(losses: Sequence[float], n_steps: int, *, title: str) -> Figure:
    """Return the loss by step, on an axis that has room for all steps."""
    fig, axes = canvas(title, x="step", y="next-token loss (nats per token)")
    axes.plot(range(1, len(losses) + 1), losses, color=SERIES[0])
    axes.set_xlim(0, n_steps)
    return fig


def summary(records: Sequence[StepMetrics], n_steps: int, *, caption: str) -> Shown:
    """Return what stays on the page after a run: the curve, and how far it came."""
    n_done = len(records)
    end = f"Trained {n_done:,} of {n_steps:,} steps."
    if n_done < n_steps:
        end = (
            f"Stopped after {n_done:,} of {n_steps:,} steps; what was learned is kept."
        )
    if not records:
        return Shown(text=end)
    first, last = records[0].loss_main, records[-1].loss_main
    fig = loss_curve(
        [record.loss_main for record in records],
        n_done,
        title=f"The loss goes from {first:.2f} to {last:.2f} in {n_done:,} steps",
    )
    speed = sum(record.tokens_per_second for record in records) / n_done
    page = figure_html(
        fig,
        alt=f"next-token loss over {n_done:,} training steps",
        caption=f"{end} {caption}".strip(),
        measured=f"Loss {first:.2f} → {last:.2f}, {speed:,.0f} tokens per second.",
    )
    return Shown(text=end, html=page, varies=True)


class TrainingView:
    """Status, curve, progress and Stop of one run."""

    def __init__(self, n_steps: int) -> None:
        self.n_steps = n_steps
        self.is_stopped = False
        self.losses: list[float] = []
        self.view = View()
        self.progress = IntProgress(0, min=0, max=n_steps, description="steps")
        self.stop_button = Button(
            description="Stop",
            tooltip="End after this step and keep what was learned",
            button_style="warning",
        )
        self.stop_button.on_click(lambda _: self.stop())
        row = HBox([self.stop_button, self.progress])
        self.box = VBox([row, self.view.status, self.view.image])
        self.box.add_class("labkit-training")
        self._throttle = Throttle()
        self.view.say(f"step 0 of {n_steps:,}")

    def record(self, metrics: StepMetrics) -> None:
        """Take a step's record, and show it if it is time to."""
        self.losses.append(metrics.loss_main)
        if not self._throttle.is_due():
            return
        start = time.monotonic()
        n_done = len(self.losses)
        text = (
            f"step {n_done:,} of {self.n_steps:,} · loss {metrics.loss_main:.2f} · "
            f"{metrics.tokens_per_second:,.0f} tokens per second"
        )
        self.progress.value = n_done
        title = f"Loss {self.losses[0]:.2f} → {metrics.loss_main:.2f}"
        self.view.update(loss_curve(self.losses, self.n_steps, title=title), text)
        self._throttle.spent(time.monotonic() - start)

    def stop(self) -> None:
        """End the run after the step it is in."""
        self.is_stopped = True
        self.view.say("stopping after this step …")

    def close(self) -> None:
        """Make way for the summary."""
        self.stop_button.disabled = True
        self.box.layout.display = "none"
