"""Figures of one style: a finding as title, units on axes, words beside the data.

`style` holds the colours and their fixed meaning, `charts` the kinds of figure as
pure functions of values, `export` the one way to put a figure on a page.
"""

from labkit.workbook.figures.charts import Part, bars, lines, stacks
from labkit.workbook.figures.export import figure, figure_html, png
from labkit.workbook.figures.style import COLOURS, SERIES, canvas

__all__ = [
    "COLOURS",
    "SERIES",
    "Part",
    "bars",
    "canvas",
    "figure",
    "figure_html",
    "lines",
    "png",
    "stacks",
]
