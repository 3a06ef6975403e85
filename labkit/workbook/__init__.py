"""What the notebooks are made of: exercises, guesses, figures, widgets, claims.

The only room that imports IPython, ipywidgets and matplotlib.
"""

from labkit.workbook import figures, lab, widgets
from labkit.workbook.exercises import exercise

__all__ = ["exercise", "figures", "lab", "widgets"]
