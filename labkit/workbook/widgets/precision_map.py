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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ipywidgets import (
    Button,
    ButtonStyle,
    GridBox,
    HBox,
    Label,
    Layout,
    ValueWidget,
    VBox,
)
from matplotlib.figure import Figure

from labkit.precision import POLICIES, PrecisionPlan, QuantSpec
from labkit.precision.plan import PlanRow
from labkit.workbook.figures.precision_map import (
    LOOKS,
    Consequence,
    Grid,
    consequences,
    precision_map,
)
from labkit.workbook.precision_map import (
    DEVICES,
    MODELS,
    NARROW,
    ROWS,
    Cell,
    MapPlan,
    kept_bytes,
)
from labkit.workbook.product_error import ProductSample, untrained_sample
from labkit.workbook.spelling import spell
from labkit.workbook.widgets.controls import LinkedControls, choice, steps

Settings = Mapping[str, Any]
"""The controls' values, by name; `map` holds the selected cell and the edits."""

SPEEDS = (80, 100, 120, 140, 160, 180, 200)

START = Cell("layers 3-60", "routed experts")

NAMES = "130px"
"""Width of the rows' names."""

CELL = "124px"


class CellGrid(GridBox, ValueWidget):
    """A button for each place of the map that holds an operator.

    `value` is the cell that is selected, and the edits.
    """

    def __init__(self) -> None:
        super().__init__(layout=Layout(grid_gap="2px", margin="8px 0"))
        self._plan: MapPlan | None = None
        self._buttons: list[Button] = []
        self._cells: list[Cell] = []
        self._blank = Label("", layout=Layout(margin="0"))
        looks = {name: (look.colour, look.ink) for name, look in LOOKS.items()}
        self._styles = {
            (name, weight): ButtonStyle(
                button_color=colour,
                text_color=ink,
                font_weight=weight,
                font_size="11px",
            )
            for name, (colour, ink) in looks.items()
            for weight in ("normal", "bold")
        }
        size = {"width": CELL, "height": "32px", "margin": "0", "padding": "0"}
        self._layouts = {
            True: Layout(border="2px solid #222222", **size),
            False: Layout(border="2px solid transparent", **size),
        }
        self.value = (START, ())

    def show(self, plan: MapPlan) -> None:
        """Show a plan's cells, with the selected one framed."""
        self._plan = plan
        columns, cells = plan.columns, plan.cells
        rows = _rows(plan)
        places = [Cell(column, row) for row in rows for column in columns]
        self._cells = [place for place in places if place in cells]
        while len(self._buttons) < len(self._cells):
            self._add_button()
        for button, cell in zip(self._buttons, self._cells, strict=False):
            self._dress(button, cell)
        buttons = iter(self._buttons)
        children = [self._blank, *(_label(column, "center") for column in columns)]
        for row in rows:
            children.append(_label(row, "flex-end"))
            children += [
                next(buttons) if Cell(column, row) in cells else self._blank
                for column in columns
            ]
        self.layout.grid_template_columns = f"{NAMES} repeat({len(columns)}, {CELL})"
        self.children = children

    def _add_button(self) -> None:
        button, place = Button(), len(self._buttons)
        button.on_click(lambda _: self.press(self._cells[place]))
        self._buttons.append(button)

    def _dress(self, button: Button, cell: Cell) -> None:
        """Give a button the words, the colours and the frame of its cell."""
        plan = self._plan
        words, look = _words(plan.cells[cell])
        is_edited = cell in dict(plan.edits)
        button.description = f"• {words}" if is_edited else words
        button.tooltip = f"{cell.row}, {cell.column}: {_reason(plan, cell)}"
        button.style = self._styles[look, "bold" if is_edited else "normal"]
        button.layout = self._layouts[cell == plan.selected]

    def press(self, cell: Cell) -> None:
        """Select a cell; if it is selected, ask for its next level."""
        selected, edits = self.value
        if cell == selected:
            edits = self._plan.next_edits(cell)
        self.value = (cell, edits)


def _label(text: str, side: str) -> Label:
    looks = Layout(justify_content=side, margin="0 6px 0 0", overflow="visible")
    return Label(text, layout=looks)


class MapControls(LinkedControls):
    """A model, a device, a policy and a speed, and the map that follows from them."""

    def __init__(self) -> None:
        super().__init__(
            {
                "percent": steps(
                    "speed of FP8 products", SPEEDS, value=160, unit="% of BF16's"
                ),
                "model": choice("model", list(MODELS)),
                "device": choice("device", list(DEVICES), value="H100, H800"),
                "policy": choice("policy", list(POLICIES), value="deepseek-v3"),
                "map": CellGrid(),
            }
        )
        self._set_side_by_side("model", "device", "policy")

    def _set_side_by_side(self, *names: str) -> None:
        """Put choices beside one another, between the slider and the map."""
        chosen = [self.controls[name] for name in names]
        titled = [VBox([Label(each.tooltip), each]) for each in chosen]
        beside = HBox(titled, layout=Layout(grid_gap="48px", margin="4px 0 0 24px"))
        self.children = [self.controls["percent"], beside, self.controls["map"]]

    def link(self, moved: str) -> None:
        """Let the map follow; another model or policy starts without edits."""
        grid = self.controls["map"]
        selected, edits = grid.value
        settings = {name: control.value for name, control in self.controls.items()}
        if moved in ("model", "policy"):
            settings["map"] = (selected, ())
        plan = plan_of(settings)
        if selected not in plan.cells:
            plan = replace(plan, selected=_nearest(selected, plan))
        grid.value = (plan.selected, plan.edits)
        grid.show(plan)


def plan_of(settings: Settings) -> MapPlan:
    """Return the plan that the controls' values stand for."""
    values = dict(settings)
    selected, edits = values.pop("map")
    return MapPlan(**values, selected=selected, edits=edits)


def _nearest(cell: Cell, plan: MapPlan) -> Cell:
    """Return a cell of the same row, or else the first."""
    same = [other for other in plan.cells if other.row == cell.row]
    n_operators = {other: len(rows) for other, rows in plan.cells.items()}
    return max(same, key=n_operators.__getitem__, default=next(iter(plan.cells)))


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
        cells = {cell: _words(rows) for cell, rows in chosen.cells.items()}
        grid = Grid(columns=chosen.columns, rows=_rows(chosen), cells=cells)
        return precision_map(grid, _bars(chosen), title=_title(chosen))

    def describe(self, plan: Settings) -> str:
        """Return what the plan means as a whole, and for the selected cell."""
        chosen = plan_of(plan)
        return f"{_whole(chosen)} {self._selected(chosen)}"

    def _selected(self, plan: MapPlan) -> str:
        """Return what the selected cell gets, why, and what it takes."""
        cell = plan.selected
        part = plan.part(cell)
        words, _ = _words(part.rows)
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
            f"Why: {_reason(plan, cell)}."
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


def _rows(plan: MapPlan) -> list[str]:
    return [row for row in ROWS if any(cell.row == row for cell in plan.cells)]


def _words(rows: Sequence[PlanRow]) -> tuple[str, str]:
    """Return what a cell says, and its look: that of its operators in FP8, if any."""
    each = dict.fromkeys(map(_words_of, rows))
    names = [words for words, _ in each]
    looks = [look for _, look in each]
    return " / ".join(names), min(looks, key=list(LOOKS).index)


def _words_of(row: PlanRow) -> tuple[str, str]:
    is_narrow = row.kept in NARROW
    if row.operator.kind == "send":
        return (
            f"{'FP8' if is_narrow else 'BF16'} sent",
            "stored" if is_narrow else "bf16",
        )
    kept = f", keeps {row.kept.upper()}" if is_narrow else ""
    is_e5m6 = row.kept == "e5m6"
    if row.compute in ("fp8", "emulated"):
        name = "FP8" if row.compute == "fp8" else "emul." if is_e5m6 else "emulated"
        return f"{name}{kept if is_e5m6 else ''}", row.compute
    name = (row.compute or row.weight).upper()
    if row.weight == "e4m3":
        return f"{name}, stored FP8", "stored"
    return f"{name}{kept}", "stored" if is_narrow else name.lower()


def _reason(plan: MapPlan, cell: Cell) -> str:
    """Return why a cell's operators are as they are, each reason once.

    What a device does to all of them is left out where the whole plan says it.
    """
    units = plan.planned.units
    said = "" if units.multiplies else f"; {units.reason}"
    reasons = (row.reason.removesuffix(said) for row in plan.cells[cell])
    return "; ".join(dict.fromkeys(w for each in reasons for w in each.split("; ")))


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
