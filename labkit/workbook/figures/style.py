"""The look of every figure, and what each colour means throughout the book."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "#0072B2",
        "gradients": "#E69F00",
        "optimizer": "#CC79A7",
        "activations": "#009E73",
        "communication": "#D55E00",
        "cache": "#56B4E9",
        "idle": "#BBBBBB",
        "ink": "#222222",
    }
)
"""Okabe and Ito's palette, told apart by every kind of colour vision."""

SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours of curves that stand for no part of memory, in order of use."""

WIDTH = 720
"""Pixels a figure takes on the page: it fits beside the side bar of a laptop."""

PIXELS_PER_INCH = 100

STYLE: Mapping[str, Any] = MappingProxyType(
    {
        "font.family": "DejaVu Sans",  # comes with matplotlib: equal everywhere
        "font.size": 10,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#666666",
        "axes.labelcolor": COLOURS["ink"],
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#DDDDDD",
        "grid.linewidth": 0.7,
        "lines.linewidth": 2.0,
        "text.color": COLOURS["ink"],
        "figure.facecolor": "white",
    }
)


def canvas(
    title: str, *, x: str, y: str = "", height: int = 300, grid: str = "both"
) -> tuple[Figure, Axes]:
    """Return an empty figure in the book's style.

    Args:
        title: the finding, as a sentence.
        x: label of the horizontal axis, with its unit.
        y: label of the vertical axis, with its unit; "" where the bars' names say it.
        height: pixels on the page.
        grid: the axis that carries grid lines: "x", "y" or "both".
    """
    size = (WIDTH / PIXELS_PER_INCH, height / PIXELS_PER_INCH)
    with mpl.rc_context(dict(STYLE)):
        fig = Figure(figsize=size, dpi=PIXELS_PER_INCH, layout="constrained")
        axes = fig.subplots()
        fig.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if grid != "both":
            axes.grid(visible=False, axis="y" if grid == "x" else "x")
    return fig, axes
