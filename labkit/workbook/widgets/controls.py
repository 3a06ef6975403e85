"""Labelled controls, all moved by keyboard and each named with its unit.

None of them is continuous: a control speaks once, when it comes to rest, so that a
figure is drawn once per move.
"""

from collections.abc import Mapping, Sequence

from ipywidgets import (
    Checkbox,
    HBox,
    IntSlider,
    Label,
    Layout,
    RadioButtons,
    SelectionSlider,
    ValueWidget,
    VBox,
    Widget,
)

WIDE = "640px"
NAME_WIDTH = "240px"


def _label(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def _looks(name: str, unit: str) -> dict[str, object]:
    """Return what all controls share: the full label, never cut off."""
    return {
        "description": _label(name, unit),
        "tooltip": _label(name, unit),
        "style": {"description_width": NAME_WIDTH},
        "layout": Layout(width=WIDE, max_width="100%"),
    }


def slider(
    name: str, bounds: tuple[int, int], *, value: int, step: int = 1, unit: str = ""
) -> IntSlider:
    """Return a slider over whole numbers between two bounds, both included."""
    low, high = bounds
    return IntSlider(
        value,
        low,
        high,
        step,
        continuous_update=False,
        readout_format=",d",
        **_looks(name, unit),
    )


def steps(
    name: str, values: Sequence[int], *, value: int, unit: str = ""
) -> SelectionSlider:
    """Return a slider over listed numbers, such as the powers of two."""
    return SelectionSlider(
        options=[(f"{number:,}", number) for number in values],
        value=value,
        continuous_update=False,
        **_looks(name, unit),
    )


def choice(
    name: str, options: Sequence[str], *, value: str | None = None
) -> RadioButtons:
    """Return names to choose one from; the first is chosen if none is given.

    Radio buttons, because JupyterLab keeps from a drop-down list the keys that would
    change it; these are reached by Tab and chosen by Space.
    """
    chosen = options[0] if value is None else value
    looks = _looks(name, "") | {"description": "", "layout": Layout(width="auto")}
    return RadioButtons(options=list(options), value=chosen, **looks)


def row(control: ValueWidget) -> Widget:
    """Return a control as it stands on the page, its name to the left.

    Radio buttons would put theirs above, out of line with the others.
    """
    if not isinstance(control, RadioButtons):
        return control
    looks = Layout(width=NAME_WIDTH, justify_content="flex-end", margin="0 8px 0 0")
    return HBox([Label(control.tooltip or "", layout=looks), control])


def switch(name: str, *, value: bool = False) -> Checkbox:
    """Return a box to tick."""
    return Checkbox(value, indent=True, **_looks(name, ""))


class LinkedControls(VBox, ValueWidget):
    """Controls of which some move others, as a model moves its sizes.

    `value` holds what they stand at, by name. It changes once per move, also when one
    moves several. At the start the first is taken as moved.
    """

    def __init__(self, controls: Mapping[str, ValueWidget]) -> None:
        self.controls = controls
        super().__init__([row(control) for control in controls.values()])
        self._is_linking = False
        self._take(next(iter(controls)))
        for name, control in controls.items():
            control.observe(lambda _, name=name: self._take(name), "value")

    def link(self, moved: str) -> None:
        """Move what follows from a move."""
        raise NotImplementedError

    def _take(self, moved: str) -> None:
        """Take over a move, with what follows from it."""
        if self._is_linking:
            return
        self._is_linking = True
        self.link(moved)
        self._is_linking = False
        self.value = {name: control.value for name, control in self.controls.items()}
