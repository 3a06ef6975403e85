"""Controls that answer a question: move one, and a figure and a sentence follow.

`controls` makes labelled controls, `bundle` binds them to pure functions,
`experiment` runs longer work that shows its progress and can be stopped, `training`
shows a loss curve while a model trains.
"""

from labkit.workbook.widgets.bundle import explore
from labkit.workbook.widgets.controls import choice, slider, steps, switch
from labkit.workbook.widgets.experiment import experiment
from labkit.workbook.widgets.training import live_training

__all__ = [
    "choice",
    "experiment",
    "explore",
    "live_training",
    "slider",
    "steps",
    "switch",
]
