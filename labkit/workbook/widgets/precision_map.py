"""The precision map: what each operator gets, and what another level would bring.

    widgets.explore(
        view.draw, view.describe, caption="…", draw_static=view.draw_static,
        **view.controls(),
    )

where `view = PrecisionMap()`, or `PrecisionMap(sample_of(model, tokens))` for errors of
another model's products, see `product_error`.

A press on a cell selects it, and the status line says why it is as it is; a press on
the selected one asks for its next level. Choosing a model or a policy forgets what was
asked for.
"""

import math
from dataclasses import replace

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.precision import PrecisionPlan, QuantSpec
from labkit.precision.plan import PlanRow
from labkit.workbook.figures.precision_map import (
    Consequence,
    Grid,
    consequences,
    precision_map,
)
from labkit.workbook.precision_map import MapPlan, kept_bytes
from labkit.workbook.product_error import ProductSample, untrained_sample
from labkit.workbook.spelling import spell
from labkit.workbook.widgets.precision_grid import MapControls, Settings, plan_of


class PrecisionMap:
    """The map of a model's plan, with errors measured on a sample of products."""

    def __init__(self, sample: ProductSample | None = None) -> None:
        self.sample = sample or untrained_sample()

    def controls(self) -> dict[str, ValueWidget]:
        """Return the controls, at DeepSeek-V3 on its own device."""
        return {"plan": MapControls()}

    def draw(self, plan: Settings) -> Figure:
        """Return what the plan takes; the controls show the map itself."""
        chosen = plan_of(plan)
        return consequences(_bars(chosen), title=_title(chosen))

    def draw_static(self, plan: Settings) -> Figure:
        """Return the same below the map, for a page without controls."""
        chosen = plan_of(plan)
        cells = {cell: chosen.words(cell) for cell in chosen.cells}
        grid = Grid(columns=chosen.columns, rows=chosen.rows, cells=cells)
        return precision_map(grid, _bars(chosen), title=_title(chosen))

    def describe(self, plan: Settings) -> str:
        """Return what the plan means as a whole, and for the selected cell."""
        chosen = plan_of(plan)
        return f"{_whole(chosen)} {self._selected(chosen)}"

    def _selected(self, plan: MapPlan) -> str:
        """Return what the selected cell gets, why, and what it takes."""
        cell = plan.selected
        part = plan.part(cell)
        words, _ = plan.words(cell)
        facts = []
        if share := plan.flop_share(cell):
            facts.append(f"{_percent(share)} of the FLOPs")
        if n_bytes := sum(part.weight_bytes.values()):
            facts.append(f"{_size(n_bytes)} of weights")
        kept = kept_bytes(plan.planned, plan.cfg, part.rows)
        if kept := sum(kept.values()):
            facts.append(f"{_size(kept)} kept per token")
        if (error := self._error(part)) is not None:
            decibels = -20 * math.log10(error)
            facts.append(
                f"on a sample its product is off by {100 * error:.2g} % "
                f"({decibels:.1f} dB)"
            )
        return (
            f"▶ {_first_upper(cell.row)}, {cell.column}: {', '.join([words, *facts])}. "
            f"Why: {plan.reason(cell)}."
        )

    def _error(self, part: PrecisionPlan) -> float | None:
        """Return the largest error of a cell's products, as the sample has it."""
        errors = []
        for row in part.rows:
            if row.operator.kind == "product" and row.compute != "fp32":
                errors.append(self.sample.error(row.operator.part, *_specs(row, part)))
        return max((error for error in errors if error is not None), default=None)


def _specs(row: PlanRow, plan: PrecisionPlan) -> tuple[QuantSpec, QuantSpec]:
    """Return in what a product reads its input and its weight."""
    is_fp8 = row.compute in ("fp8", "emulated")
    high = QuantSpec(format="bf16")
    inputs = plan.units.inputs if is_fp8 else high
    return inputs, plan.units.weights if row.weight == "e4m3" else high


def _bars(plan: MapPlan) -> list[Consequence]:
    """Return what the plan takes of each, by what all BF16 would."""
    names = ("weights", "kept inputs per token", "sent per token", "time, at best")
    amounts = zip(*map(_amounts, (plan, *_rivals(plan))), strict=True)
    bars = []
    for name, (mine, policy, bf16) in zip(names, amounts, strict=True):
        if bf16 == 0:
            continue  # nothing is sent where there are no experts
        text = (
            f"{100 * mine / bf16:.0f} %"
            if name == names[-1]
            else f"{_size(mine)} of {_size(bf16)}"
        )
        bars.append(
            Consequence(
                name=name,
                percent=100 * mine / bf16,
                unedited=100 * policy / bf16,
                text=text,
            )
        )
    return bars


def _rivals(plan: MapPlan) -> tuple[MapPlan, MapPlan]:
    """Return the plan without edits, and that with all in BF16."""
    bare = replace(plan, edits=())
    return bare, replace(bare, policy="bf16")


def _amounts(plan: MapPlan) -> tuple[float, ...]:
    """Return bytes of weights, kept for a token, sent for a token; and a time."""
    planned = plan.planned
    return (
        sum(planned.weight_bytes.values()),
        sum(kept_bytes(planned, plan.cfg).values()),
        planned.sent_bytes(),
        1 / (1 + planned.speed_up(plan.percent / 100)),
    )


def _whole(plan: MapPlan) -> str:
    """Return what the whole plan brings."""
    planned = plan.planned
    n, share = len(plan.edits), planned.fp8_flop_share
    edits = f" with {n} change{'s' * (n != 1)}" if n else ""
    weights, kept, *_ = _amounts(plan)
    faster = 100 * planned.speed_up(plan.percent / 100)
    speed = (
        f"FP8 units do {_percent(share)} of the products' FLOPs; at {plan.percent} % "
        f"of BF16's speed that is {faster:+.0f} % throughput"
        f"{' at most' * (faster > 0)}"
    )
    if not planned.units.multiplies:
        reason = planned.units.reason
        speed = f"{reason}. {plan.percent} % of BF16's speed gains nothing here"
    return (
        f"{plan.model} on {plan.device}, “{plan.policy}”{edits}: {speed}. Weights "
        f"{_size(weights)}, kept inputs {_size(kept)} per token."
    )


def _title(plan: MapPlan) -> str:
    share = plan.planned.fp8_flop_share
    model = plan.model.split(" (")[0]
    if share:
        return f"{model} on {plan.device}: {_percent(share)} of the FLOPs on FP8 units"
    return f"{model} on {plan.device}: no FLOPs on FP8 units"


def _size(n_bytes: float) -> str:
    """Return bytes in the largest unit of which there is one.

    >>> _size(655.4e9), _size(1_555_456), _size(774)
    ('655 GB', '1.56 MB', '774 bytes')
    """
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if n_bytes >= unit:
            return f"{spell(n_bytes / unit)} {name}"
    return f"{n_bytes:.0f} bytes"


def _percent(share: float) -> str:
    """Return a share for readers.

    >>> _percent(1.0), _percent(0.833), _percent(0.0016)
    ('100 %', '83 %', '0.16 %')
    """
    return f"{spell(100 * share, digits=2)} %"


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
