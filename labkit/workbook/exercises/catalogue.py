"""Finding exercises: the `EXERCISES` of every module named `nNN_topic` beside this."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from labkit.workbook.exercises.spec import Exercise

PACKAGE = __package__ or ""


def modules() -> list[str]:
    """Return the names of the modules with exercises, in the order of the book.

    >>> modules()[0]
    'n00_start_here'
    """
    folder = [str(Path(__file__).parent)]
    names = (module.name for module in pkgutil.iter_modules(folder))
    return sorted(name for name in names if name[0] == "n" and name[1:3].isdigit())


def exercises_of(module: str) -> tuple[Exercise, ...]:
    """Return the exercises of one notebook, by the name of its module."""
    return importlib.import_module(f"{PACKAGE}.{module}").EXERCISES


def all_exercises() -> Iterator[Exercise]:
    """Yield the exercises of the whole book, in order."""
    for module in modules():
        yield from exercises_of(module)


def find(name: str) -> Exercise:
    """Return the exercise of that name.

    Raises:
        ValueError: no exercise has this name.
    """
    known = []
    for exercise in all_exercises():
        if exercise.name == name:
            return exercise
        known.append(exercise.name)
    raise ValueError(
        f"no exercise is named {name!r}. The book has: {', '.join(known)}."
    )
