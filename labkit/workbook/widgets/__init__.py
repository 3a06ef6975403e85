"""Controls that answer a question: move one, and a figure and a sentence follow.

`controls` makes labelled controls, `bundle` binds them to pure functions,
`experiment` runs longer work that shows its progress and can be stopped.
`training.live_training`, which shows a loss curve while a model trains, is imported
from its own module: it brings the training room along, and PyTorch with it.
"""

from labkit.workbook.widgets.bundle import explore
from labkit.workbook.widgets.controls import choice, slider, steps, switch
from labkit.workbook.widgets.experiment import experiment

__all__ = [
    "choice",
    "experiment",
    "explore",
    "slider",
    "steps",
    "switch",
]
