"""The schedule viewer: who does what when in a pipeline, who waits, who keeps what.

widgets.explore(draw, describe, caption="…", **controls())
"""

from typing import Any

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.workbook.figures.pipeline import schedule_figure
from labkit.workbook.pipelines import SCHEDULES, PipelinePlan
from labkit.workbook.spelling import spell
from labkit.workbook.widgets.controls import choice, slider, steps


def controls(**start: Any) -> dict[str, ValueWidget]:  # noqa: ANN401
    """Return the viewer's controls, by the names of `PipelinePlan`'s fields.

    Args:
        **start: values to begin with, by the same names.
    """
    begin = {"schedule": "1F1B", "pp": 4, "micro_batches": 8, "sent": 0, "tail": 0}
    begin |= start
    return {
        "schedule": choice("schedule", list(SCHEDULES), value=begin["schedule"]),
        "pp": steps("ranks", (2, 4, 8, 16), value=begin["pp"], unit="of the pipeline"),
        "micro_batches": steps(
            "micro-batches",
            (2, 4, 6, 8, 12, 16, 24, 32),
            value=begin["micro_batches"],
            unit="per step",
        ),
        "sent": slider(
            "sent within a pass",
            (0, 100),
            value=begin["sent"],
            step=10,
            unit="% of a forward",
        ),
        "tail": slider(
            "head on the last stage",
            (0, 100),
            value=begin["tail"],
            step=10,
            unit="% of a rank",
        ),
    }


def draw(**plan: Any) -> Figure:  # noqa: ANN401
    """Return the figure for the controls' values."""
    chosen = PipelinePlan(**plan)
    return schedule_figure(
        chosen.timeline,
        title=_title(chosen),
        kept=chosen.kept_gb,
        kept_name="most kept (GB)",
    )


def _title(plan: PipelinePlan) -> str:
    text = f"{plan.schedule}: ranks wait {_percent(plan.shares.waiting)} of the time"
    if plan.sent:
        text += f", and for messages {_percent(plan.shares.sending)}"
    return text


def describe(**plan: Any) -> str:  # noqa: ANN401
    """Return what the controls' values mean, in numbers."""
    chosen = PipelinePlan(**plan)
    shares, most = chosen.shares, max(chosen.kept)
    fullest = chosen.kept.index(most)
    seconds, ideal = chosen.timeline.seconds, chosen.computing / chosen.pp
    sent = f", {_percent(shares.sending)} for messages" if chosen.sent else ""
    sentences = (
        f"{chosen.schedule} on {chosen.pp} ranks, {chosen.n} micro-batches: a step "
        f"takes {spell(seconds)} forward passes, {spell(seconds / ideal)} times its "
        f"computation; of the ranks' time {_percent(shares.waiting)} is "
        f"waiting{sent}.",
        f"Rank {fullest} keeps most: {spell(most)} micro-batches, "
        f"{spell(chosen.kept_gb[fullest])} GB if the model is DeepSeek-V3.",
        chosen.kind.says,
        chosen.note,
    )
    return " ".join(filter(None, sentences))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
