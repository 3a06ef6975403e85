"""Labelled controls, all moved by keyboard and each named with its unit.

None of them is continuous: a control speaks once, when it comes to rest, so that a
figure is drawn once per move.
"""

from collections.abc import Sequence

from ipywidgets import Checkbox, IntSlider, Layout, RadioButtons, SelectionSlider

WIDE = "640px"


def _label(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def _looks(name: str, unit: str) -> dict[str, object]:
    """Return what all controls share: the full label, never cut off."""
    return {
        "description": _label(name, unit),
        "tooltip": _label(name, unit),
        "style": {"description_width": "240px"},
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
    return RadioButtons(
        options=list(options),
        value=chosen,
        **_looks(name, ""),
    )


def switch(name: str, *, value: bool = False) -> Checkbox:
    """Return a box to tick."""
    return Checkbox(value, indent=True, **_looks(name, ""))
