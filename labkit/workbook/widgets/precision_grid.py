"""The map of a precision plan as buttons, and the controls that it follows."""

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

from labkit.precision import POLICIES
from labkit.workbook.figures.precision_map import LOOKS
from labkit.workbook.precision_map import DEVICES, MODELS, Cell, MapPlan
from labkit.workbook.widgets.controls import LinkedControls, choice, steps

Settings = Mapping[str, Any]
"""The controls' values, by name; `map` holds the selected cell and the edits."""

SPEEDS = (80, 100, 120, 140, 160, 180, 200)

START = Cell("layers 3-60", "routed experts")

NAMES = "130px"
"""Width of the rows' names."""

CELL = "124px"
"""Width of a cell: six of them fit beside the names."""


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
            name: ButtonStyle(button_color=colour, text_color=ink, font_size="11px")
            for name, (colour, ink) in looks.items()
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
        places = [Cell(column, row) for row in plan.rows for column in plan.columns]
        cells = [place for place in places if place in plan.cells]
        if cells != self._cells:
            self._cells = cells
            self._lay_out(places)
        for button, cell in zip(self._buttons, cells, strict=False):
            self._dress(button, cell)

    def _lay_out(self, places: Sequence[Cell]) -> None:
        """Put names and buttons in their places; buttons are used again."""
        while len(self._buttons) < len(self._cells):
            self._add_button()
        columns = list(dict.fromkeys(place.column for place in places))
        buttons, filled = iter(self._buttons), set(self._cells)
        children = [self._blank, *(_label(column, "center") for column in columns)]
        for place in places:
            if place.column == columns[0]:
                children.append(_label(place.row, "flex-end"))
            children.append(next(buttons) if place in filled else self._blank)
        self.layout.grid_template_columns = f"{NAMES} repeat({len(columns)}, {CELL})"
        self.children = children

    def _add_button(self) -> None:
        button, place = Button(), len(self._buttons)
        button.on_click(lambda _: self.press(self._cells[place]))
        self._buttons.append(button)

    def _dress(self, button: Button, cell: Cell) -> None:
        """Give a button the words, the colours and the frame of its cell."""
        plan = self._plan
        words, look = plan.words(cell)
        # A dot and no bold type: the longest words just fit.
        button.description = f"• {words}" if cell in dict(plan.edits) else words
        button.tooltip = f"{cell.row}, {cell.column}: {plan.reason(cell)}"
        button.style = self._styles[look]
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
