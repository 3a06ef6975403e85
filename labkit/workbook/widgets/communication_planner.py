"""The communication planner: what messages take of a step, and what makes it less.

widgets.explore(draw, describe, caption="…", **controls())
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.config import Layout
from labkit.workbook.figures.charts import Part, stacks
from labkit.workbook.spelling import spell
from labkit.workbook.step_shares import Parts, Run
from labkit.workbook.widgets.controls import choice, slider, switch

RUNS: Mapping[str, Run] = MappingProxyType(
    {
        "DeepSeek-V3 on 2,048 GPUs": Run(layout=Layout(pp=16, dp=128, ep=64)),
        "DeepSeek-V2-Lite on 64 GPUs": Run(
            model="v2-lite-16b", layout=Layout(dp=64, ep=8), n_sequences=256
        ),
    }
)

CARDS = {"H800": "h800", "H100": "h100", "A100": "a100-80g"}

TOKENS = {
    "FP32": ("FP32", "FP32"),
    "BF16": ("BF16", "BF16"),
    "FP8 there, BF16 back": ("FP8", "BF16"),
}
"""Formats of tokens on their way to experts and back."""

GRADIENTS = {"FP32": 4, "BF16": 2, "8 bits": 1, "largest 1 %": 0.08}
"""Bytes of a value in messages; of the largest, each is sent with its place."""

MEANINGS = {
    "computing": "activations",
    "experts": "communication",
    "gradients": "gradients",
    "pipeline": "idle",
    "imbalance": "cache",
}
"""Parts of a step, and their colours."""

NAMES = {
    "computing": "computing",
    "experts": "tokens",
    "gradients": "gradients",
    "pipeline": "pipeline waits",
    "imbalance": "waits for full experts",
}


@dataclass(frozen=True, kw_only=True)
class CommunicationPlan:
    """What the planner's controls stand at, and what follows from them."""

    run: str
    card: str
    tokens: str
    is_deduplicated: bool
    overlap: int
    """In percent of what is sent beside computing."""

    gradients: str
    is_hierarchical: bool
    imbalance: int
    """Load of the fullest rank's experts, in percent of the mean."""

    @cached_property
    def plain(self) -> Run:
        """The same step with FP32 messages, sent plainly, nothing hidden."""
        return replace(
            RUNS[self.run],
            card=CARDS[self.card],
            there="FP32",
            back="FP32",
            is_deduplicated=False,
            imbalance=self.imbalance / 100,
        )

    @cached_property
    def chosen(self) -> Run:
        """The step as the controls have it."""
        there, back = TOKENS[self.tokens]
        return replace(
            self.plain,
            there=there,
            back=back,
            is_deduplicated=self.is_deduplicated,
            overlap=self.overlap / 100,
            gradient_bytes=GRADIENTS[self.gradients],
            is_hierarchical=self.is_hierarchical,
        )

    @property
    def speed_up(self) -> float:
        """How many times as fast the chosen step is as the plain one."""
        return self.plain.parts.total / self.chosen.parts.total


def controls() -> dict[str, ValueWidget]:
    """Return the planner's controls, by the names of `CommunicationPlan`'s fields."""
    return {
        "run": choice("model", list(RUNS)),
        "card": choice("card", list(CARDS)),
        "tokens": choice("tokens travel as", list(TOKENS)),
        "is_deduplicated": switch("a node gets each token once"),
        "overlap": slider(
            "hidden behind computing", (0, 100), value=0, step=5, unit="%"
        ),
        "gradients": choice("gradients travel as", list(GRADIENTS)),
        "is_hierarchical": switch("gradients are summed inside nodes first"),
        "imbalance": slider(
            "fullest experts", (100, 200), value=100, step=5, unit="% of the mean"
        ),
    }


def draw(**plan: Any) -> Figure:  # noqa: ANN401
    """Return the plain step above the chosen one."""
    chosen = CommunicationPlan(**plan)
    rows = {"plainly": chosen.plain.parts, "as chosen": chosen.chosen.parts}
    return stacks(
        {name: _bars(parts) for name, parts in rows.items()},
        title=_title(chosen),
        x="predicted seconds of a step",
    )


def _bars(parts: Parts) -> list[Part]:
    return [
        Part(name=NAMES[part], amount=getattr(parts, part), meaning=meaning)
        for part, meaning in MEANINGS.items()
    ]


def _title(plan: CommunicationPlan) -> str:
    before, after = (
        100 * run.parts.communication_share for run in (plan.plain, plan.chosen)
    )
    if plan.plain.parts == plan.chosen.parts:
        return f"Messages take {before:.0f} % of a step, sent plainly"
    return (
        f"Messages take {after:.0f} % of a step instead of {before:.0f} %: "
        f"{plan.speed_up:.2f} times as fast"
    )


def describe(**plan: Any) -> str:  # noqa: ANN401
    """Return what messages take of the step, and what is left to shorten."""
    chosen = CommunicationPlan(**plan)
    parts, run = chosen.chosen.parts, chosen.chosen
    n = run.n_micro_batches * run.layers
    return (
        f"{chosen.run.split(' on ')[0]} on {chosen.card}: a step takes "
        f"{_seconds(parts.total)}, of which messages "
        f"{100 * parts.communication_share:.1f} %; sent plainly "
        f"{_seconds(chosen.plain.parts.total)} and "
        f"{100 * chosen.plain.parts.communication_share:.1f} %, so it is "
        f"{chosen.speed_up:.2f} times as fast. Tokens take "
        f"{_seconds(n * run.expert_seconds)} and gradients "
        f"{_seconds(run.gradient_seconds)}; computing hides "
        f"{chosen.overlap} % of that, as far as it lasts. {_advice(parts)}"
    )


def _advice(parts: Parts) -> str:
    """Return whether to look at messages or at balance: what is waited for longest."""
    waits = {part: getattr(parts, part) for part in MEANINGS if part != "computing"}
    longest = max(waits, key=lambda part: waits[part])
    remedy = {
        "experts": "send tokens once to a node, in fewer bytes, or behind computing",
        "gradients": "send gradients in fewer bytes, or behind computing",
        "pipeline": "more micro-batches, or another schedule",
        "imbalance": "balance the experts: no link is at fault",
    }[longest]
    return (
        f"Longest wait: {NAMES[longest]}, {_seconds(waits[longest])}. Remedy: {remedy}."
    )


def _seconds(seconds: float) -> str:
    return f"{spell(seconds)} s"
