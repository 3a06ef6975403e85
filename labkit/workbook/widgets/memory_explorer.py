"""The memory explorer: a model, a card and a layout; what each pipeline stage needs.

    widgets.explore(draw, describe, caption="…", plan=MemoryControls())

Choosing a model loads the layout it is known to be trained with, or a small one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.config import PRESETS, Layout, ModelConfig, TrainConfig
from labkit.hardware import accelerator
from labkit.memory import STATES, MemoryReport, fits, overheads, predict
from labkit.memory.shards import require_cuts
from labkit.workbook.figures.cache import spell_bytes
from labkit.workbook.figures.memory import Limit, columns_figure
from labkit.workbook.widgets.controls import LinkedControls, choice, slider, steps

Settings = Mapping[str, Any]
"""The controls' values, by the names of `MemoryPlan`'s fields."""

MODELS = {
    "DeepSeek-V3 (671B)": ("v3-671b", (2048, 16, 1, 64)),
    "DeepSeek-V2 (236B)": ("v2-236b", (512, 16, 1, 8)),
    "DeepSeek-V2-Lite (16B)": ("v2-lite-16b", (8, 1, 1, 8)),
}
"""Preset, and GPUs with PP, TP and EP to start from. PP and EP of V3 and V2 are those
of their reports, and so are V3's GPUs; the rest is ours."""

CARDS = {
    "A100 40 GB": "a100-40g",
    "A100 80 GB": "a100-80g",
    "H800 80 GB": "h800",
    "H200 141 GB": "h200",
    "B200 180 GB": "b200",
    "MI300X 192 GB": "mi300x",
}

PRECISIONS = {
    "BF16, moments in FP32": ("megatron", "compute"),
    "BF16, moments in BF16": ("deepseek-v3", "compute"),
    "FP8, moments in BF16": ("deepseek-v3-fp8", "fp8"),
}
"""Key of `STATES`, and how activations are cached, by the name on the page."""

POLICIES = ("none", "selective", "attention", "moe", "full")

SPREAD = "let more GPUs share them, by ZeRO, EP, PP or TP"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What the explorer's controls stand at, and what follows from them."""

    model: str
    card: str
    micro_batch: int
    seq_len: int
    n_gpus: int
    pp: int
    tp: int
    ep: int
    zero: int
    precision: str
    recompute: str

    @property
    def config(self) -> ModelConfig:
        return PRESETS[MODELS[self.model][0]]

    @property
    def capacity(self) -> int:
        """Bytes of the card."""
        return accelerator(CARDS[self.card]).memory_bytes

    @cached_property
    def layout(self) -> Layout:
        """Return the degrees of parallelism.

        Raises:
            ValueError: they do not fit each other or the model: the rule, the values
                and the fix, in the words that stand beside the sliders.
        """
        own, experts = self.pp * self.tp, self.config.moe.n_routed_experts
        if self.n_gpus < own:
            raise ValueError(
                f"PP × TP must be at most the GPUs; {self.pp} × {self.tp} = {own}, and "
                f"there are {self.n_gpus:,}. Set GPUs to {own:,}, or lower PP or TP."
            )
        if self.n_gpus // self.pp % self.ep:
            of_a_stage = self.n_gpus // self.pp
            raise ValueError(
                "EP must divide the GPUs of one stage, which share its experts; got "
                f"EP {self.ep} and {self.n_gpus:,} / {self.pp} = {of_a_stage}. Set EP "
                f"to {of_a_stage} or less, or GPUs to {self.ep * self.pp:,}."
            )
        if experts % self.ep:
            raise ValueError(
                "EP must divide the routed experts, as each rank holds whole ones; got "
                f"EP {self.ep} and {experts}. Set EP to {gcd(self.ep, experts)}."
            )
        if self.pp > self.config.n_layers:
            raise ValueError(
                "PP must be at most the layers, as each stage has one; got "
                f"PP {self.pp} and {self.config.n_layers}. Set PP to "
                f"{self.pp // 2} or less."
            )
        return Layout(pp=self.pp, dp=self.n_gpus // own, tp=self.tp, ep=self.ep)

    @cached_property
    def report(self) -> MemoryReport:
        """The prediction, with as many micro-batches as there are stages."""
        n_sequences = self.micro_batch * self.layout.dp * self.pp
        train = TrainConfig(
            micro_batch=self.micro_batch,
            global_batch=n_sequences,
            seq_len=self.seq_len,
            precision="bf16",
        )
        states, cached = PRECISIONS[self.precision]
        return predict(
            self.config,
            train,
            self.layout,
            CARDS[self.card],
            recompute=self.recompute,
            zero=self.zero,
            states=STATES[states],
            cached=cached,
        )

    @property
    def stages(self) -> tuple[MemoryReport, ...]:
        """A report for each pipeline stage."""
        return self.report.by_stage or (self.report,)

    @property
    def fullest(self) -> int:
        """The stage with the highest peak."""
        peaks = [stage.peak for stage in self.stages]
        return peaks.index(max(peaks))

    @cached_property
    def verdict(self) -> str:
        """Whether it fits with all that no prediction counts; see `fits`."""
        return fits(self.report, layout=self.layout, device=CARDS[self.card])

    @property
    def beside(self) -> str:
        """What a GPU holds beside the prediction, at least and at most."""
        more = overheads(self.report, self.layout, CARDS[self.card])
        return f"{spell_bytes(more.low)} to {spell_bytes(more.high)}"


class MemoryControls(LinkedControls):
    """Sliders over model, card and layout, at what DeepSeek-V3 reports of its own."""

    def __init__(self) -> None:
        super().__init__(_controls())

    def link(self, moved: str) -> None:
        """Follow a model with a layout that fits it."""
        if moved == "model":
            layout = MODELS[self.controls["model"].value][1]
            for name, size in zip(("n_gpus", "pp", "tp", "ep"), layout, strict=True):
                self.controls[name].value = size


def _controls() -> dict[str, ValueWidget]:
    powers = [2**n for n in range(18)]
    controls = {
        "model": choice("model", list(MODELS)),
        "card": choice("card", list(CARDS), value="H800 80 GB"),
        "micro_batch": steps("micro-batch", powers[:7], value=1, unit="sequences"),
        "seq_len": steps("sequence", powers[10:], value=4096, unit="tokens"),
        "n_gpus": steps("GPUs", powers[:14], value=2048),
        "pp": steps("PP", powers[:6], value=16, unit="pipeline stages"),
        "tp": steps("TP", powers[:5], value=1, unit="ranks per matrix"),
        "ep": steps("EP", powers[:9], value=64, unit="ranks per set of experts"),
        "zero": slider("ZeRO", (0, 3), value=1, unit="stage"),
        "precision": choice("precision", list(PRECISIONS), value=[*PRECISIONS][2]),
        "recompute": choice("recompute", POLICIES, value="selective"),
    }
    for name in ("model", "card", "precision", "recompute"):
        controls[name].orientation = "horizontal"
    return controls


def draw(plan: Settings) -> Figure:
    """Return a column per stage, or per instant if there is one stage only."""
    chosen = MemoryPlan(**plan)
    if chosen.pp > 1:
        columns = {
            str(number): stage.peak_instant.by_part
            for number, stage in enumerate(chosen.stages)
        }
        x = "pipeline stage, each at its fullest instant"
    else:
        columns = {instant.name: instant.by_part for instant in chosen.report.timeline}
        x = "instant of a training step, on each GPU"
    limit = Limit(n_bytes=chosen.capacity, name=_card(chosen))
    return columns_figure(columns, title=_title(chosen), x=x, limit=limit)


def _card(plan: MemoryPlan) -> str:
    return plan.card.split()[0]


def _where(plan: MemoryPlan) -> str:
    return f"stage {plan.fullest}" if plan.pp > 1 else "each GPU"


def _title(plan: MemoryPlan) -> str:
    gap = plan.capacity - plan.report.peak
    where, card = _where(plan), _card(plan)
    start = where[0].upper() + where[1:]
    if gap < 0:
        return f"{start} needs {spell_bytes(-gap)} more than the {card} has"
    return f"{start} leaves {spell_bytes(gap)} of its {card} to what is not predicted"


VERDICTS = {
    "fits": "It fits",
    "uncertain": "It may fit or not",
    "does not fit": "It does not fit",
}


def describe(plan: Settings) -> str:
    """Return whether the plan fits, what is biggest, and what to do."""
    chosen = MemoryPlan(**plan)
    layout, peak = chosen.layout, chosen.report.peak_instant
    part = max(peak.by_part, key=lambda name: peak.by_part[name])
    return (
        f"{chosen.micro_batch} × {chosen.seq_len:,} tokens on {chosen.n_gpus:,} × "
        f"{chosen.card} (PP {layout.pp}, DP {layout.dp:,}, TP {layout.tp}, "
        f"EP {layout.ep}, ZeRO-{chosen.zero}): {_where(chosen)} needs "
        f"{spell_bytes(peak.total)} in “{peak.name}”, and {chosen.beside} that are not "
        f"predicted, of {spell_bytes(chosen.capacity)}. {VERDICTS[chosen.verdict]}. "
        f"Biggest: {part}, {spell_bytes(peak.by_part[part])}. {_advice(chosen)}"
    )


def _advice(plan: MemoryPlan) -> str:
    """Return what to change: the first remedy that fits, or what there is room for."""
    if plan.verdict == "fits":
        larger = replace(plan, micro_batch=2 * plan.micro_batch)
        room = "fits too" if larger.verdict == "fits" else "would not surely fit"
        return f"A micro-batch of {larger.micro_batch} {room}."
    best, how = plan, ""
    for words, remedy in _remedies(plan):
        if remedy.verdict == "fits":
            peak = spell_bytes(remedy.report.peak)
            return f"Try {words}: with {peak} it fits."
        if remedy.report.peak < best.report.peak:
            best, how = remedy, words
    if not how:
        return (
            f"{spell_bytes(plan.report.persistent)} last from step to step: {SPREAD}."
        )
    least = spell_bytes(best.report.peak)
    return f"No single change is enough; {how} helps most, {least}: add another."


def _remedies(plan: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
    """Yield single moves of the controls that are possible, the cheapest first.

    Where the lasting parts alone are too much, those that share them out.
    """
    half_batch, half_sequence = plan.micro_batch // 2, plan.seq_len // 2
    changes: tuple[tuple[str, bool, dict[str, Any]], ...] = (
        ("ZeRO-1", plan.zero < 1, {"zero": 1}),
        (
            "recompute “selective”",
            plan.recompute == "none",
            {"recompute": "selective"},
        ),
        (f"a micro-batch of {half_batch}", half_batch > 0, {"micro_batch": half_batch}),
        (
            "recompute “attention”",
            plan.recompute in ("none", "selective"),
            {"recompute": "attention"},
        ),
        ("recompute “full”", plan.recompute != "full", {"recompute": "full"}),
        ("ZeRO-2", plan.zero < 2, {"zero": 2}),
        (f"EP {2 * plan.ep}", True, {"ep": 2 * plan.ep}),
        (f"PP {2 * plan.pp}", True, {"pp": 2 * plan.pp}),
        (f"TP {2 * plan.tp}", True, {"tp": 2 * plan.tp}),
        ("ZeRO-3", plan.zero < 3, {"zero": 3}),
        (f"a sequence of {half_sequence:,}", True, {"seq_len": half_sequence}),
    )
    lasts = plan.report.persistent > plan.capacity
    for words, is_change, change in changes:
        remedy = replace(plan, **change)
        is_futile = lasts and not change.keys() & {"zero", "ep", "pp", "tp"}
        if is_change and not is_futile and is_possible(remedy):
            yield words, remedy


def is_possible(plan: MemoryPlan) -> bool:
    """Return whether the layout fits the model, the GPUs and whole heads."""
    try:
        require_cuts(plan.config, plan.layout)
    except ValueError:
        return False
    return True
