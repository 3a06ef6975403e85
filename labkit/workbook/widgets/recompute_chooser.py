"""The recompute chooser: what to compute twice, where, and what that saves and costs.

    widgets.explore(draw, describe, caption="…", plan=RecomputeControls())

Choosing a model sets its micro-batch and its sequence.
"""

from collections.abc import Mapping
from typing import Any

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.workbook.figures.recompute import Level, Place, frontier
from labkit.workbook.recompute_plans import (
    EVERY,
    MACHINES,
    OTHERS,
    WHAT,
    Price,
    RecomputePlan,
)
from labkit.workbook.spelling import spell
from labkit.workbook.widgets.controls import LinkedControls, choice, steps, switch

Settings = Mapping[str, Any]
"""The controls' values, by the names of `RecomputePlan`'s fields."""

GB, MB = 10**9, 10**6


class RecomputeControls(LinkedControls):
    """Controls over policies, with models to start from, at DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__(_controls())

    def link(self, moved: str) -> None:
        """Follow a model with its micro-batch and its sequence."""
        if moved == "model":
            machine = MACHINES[self.controls["model"].value]
            self.controls["micro_batch"].value = machine.micro_batch
            self.controls["seq_len"].value = machine.seq_len


def _controls() -> dict[str, ValueWidget]:
    lengths = [2**n for n in range(8, 16)]
    return {
        "model": choice("model", list(MACHINES)),
        "what": choice("compute again", list(WHAT)),
        "k": steps("in the first of every", EVERY, value=1, unit="blocks"),
        "others": choice("in the other blocks", list(OTHERS)),
        "micro_batch": steps(
            "micro-batch", (1, 2, 4, 8, 16), value=1, unit="sequences"
        ),
        "seq_len": steps("sequence", lengths, value=4096, unit="tokens"),
        "is_fp8": switch("linear layers keep FP8 copies"),
        "is_kept": switch("draw what is kept, not the peak"),
    }


def draw(plan: Settings) -> Figure:
    """Return the figure for the controls' values."""
    chosen = RecomputePlan(**plan)
    price, fixed = chosen.prices()
    unit, name = _unit(chosen)

    def place(text: str, price: Price, **more: Any) -> Place:  # noqa: ANN401
        n_bytes = price.kept if chosen.is_kept else price.peak
        return Place(name=text, time=100 * price.time, memory=n_bytes / unit, **more)

    places = [place(text, each) for text, each in fixed.items() if each != price]
    places.append(place("your choice", price, meaning="chosen"))
    what = "kept for the backward" if chosen.is_kept else "peak"
    return frontier(
        places,
        title=_title(chosen, price, fixed["none"]),
        x="extra time per step, predicted (%)",
        y=f"{what}, predicted ({name})",
        levels=() if chosen.is_kept else _levels(chosen, price),
    )


def _levels(plan: RecomputePlan, price: Price) -> list[Level]:
    """Return the card's memory, and what no policy touches."""
    unit, _ = _unit(plan)
    text = f"weights, gradients, optimizer: {_size(plan, price.lasting)}"
    levels = [Level(name=text, memory=price.lasting / unit, is_limit=False)]
    if plan.capacity is not None:
        text = f"an H800: {_size(plan, plan.capacity)}"
        levels.append(Level(name=text, memory=plan.capacity / unit))
    return levels


def describe(plan: Settings) -> str:
    """Return what the controls' values mean, in numbers."""
    chosen = RecomputePlan(**plan)
    price, fixed = chosen.prices()
    none = fixed["none"]
    halves = [
        f"peaks at {_change(chosen, price.peak, none.peak)}",
        f"keeps {_change(chosen, price.kept, none.kept)} for the backward",
    ]
    first, second = reversed(halves) if chosen.is_kept else halves
    text = (
        f"{_blocks(chosen)}: {chosen.machine.ranks} {first} and {second}, for "
        f"{100 * price.time:.1f} % more time."
    )
    notes = (text, _fit(chosen, price, fixed), _rival(price, fixed))
    return " ".join(filter(None, notes))


def _change(plan: RecomputePlan, now: int, before: int) -> str:
    """Return bytes beside those without a policy."""
    share = _percent(now, before)
    return f"{_size(plan, now)} instead of {_size(plan, before)} ({share})"


def _blocks(plan: RecomputePlan) -> str:
    n, what = plan.machine.n_blocks, WHAT[plan.what]
    size = f"{plan.micro_batch} × {plan.seq_len:,} tokens"
    if plan.cached == "fp8":
        size += ", FP8 copies"
    elif plan.is_fp8:
        size += ", no FP8 copies in FP32 training"
    if plan.k == 1:
        others = "" if plan.others == "nothing" else " (there are no others)"
        return f"“{what}” in all {n} blocks{others}, {size}"
    first = -(-n // plan.k)
    return f"“{what}” in {first} blocks, “{OTHERS[plan.others]}” in {n - first}, {size}"


def _title(plan: RecomputePlan, price: Price, none: Price) -> str:
    pair = (price.kept, none.kept) if plan.is_kept else (price.peak, none.peak)
    what = "kept" if plan.is_kept else "at the peak"
    share = _percent(*pair).removeprefix("−")
    model = plan.model.split(",")[0]
    return f"{model}: {share} less {what}, for {100 * price.time:.1f} % more time"


def _fit(plan: RecomputePlan, price: Price, fixed: Mapping[str, Price]) -> str:
    """Return whether it stays below a GPU's memory, and what would if it does not."""
    if plan.capacity is None:
        return ""
    card = f"an H800 ({_size(plan, plan.capacity)})"
    if price.peak <= plan.capacity:
        free = _size(plan, plan.capacity - price.peak)
        return f"That leaves {free} of {card} to what is not predicted."
    fitting = {name: each for name, each in fixed.items() if each.peak <= plan.capacity}
    over = _size(plan, price.peak - plan.capacity)
    if not fitting:
        return (
            f"That is {over} more than {card}, and no policy saves enough: shorten "
            "the sequence or lower the micro-batch."
        )
    name = min(fitting, key=lambda name: fitting[name].time)
    return (
        f"That is {over} more than {card}; “{name}” would stay below it "
        f"for {100 * fitting[name].time:.1f} %."
    )


def _rival(price: Price, fixed: Mapping[str, Price]) -> str:
    """Return which fixed policy is better in both, if one is."""
    better = [name for name, each in fixed.items() if each.beats(price)]
    if not better:
        return ""
    name = min(better, key=lambda name: fixed[name].peak)
    return f"“{name}” is better: a lower peak, and no more time."


def _unit(plan: RecomputePlan) -> tuple[int, str]:
    return (MB, "MB") if plan.machine.device == "cpu" else (GB, "GB")


def _size(plan: RecomputePlan, n_bytes: float) -> str:
    unit, name = _unit(plan)
    return f"{spell(n_bytes / unit)} {name}"


def _percent(now: float, before: float) -> str:
    return f"−{100 * (1 - now / before):.0f} %"
