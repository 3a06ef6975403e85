"""Exercises: a task, hints, a check that answers in one line, and a solution.

In a notebook:

    ex = exercise("kv_bytes_per_token")   # shows the task
    ex.check(my_function)                 # ○ not attempted, ✓ 4/4, or ✗ and what to see
    ex.hint(); ex.solution()

To write one, see `spec`.
"""

from labkit.workbook.exercises.catalogue import all_exercises, exercises_of, find
from labkit.workbook.exercises.grading import Verdict, grade
from labkit.workbook.exercises.handle import Handle, exercise
from labkit.workbook.exercises.spec import Case, Exercise, Misconception, Score

__all__ = [
    "Case",
    "Exercise",
    "Handle",
    "Misconception",
    "Score",
    "Verdict",
    "all_exercises",
    "exercise",
    "exercises_of",
    "find",
    "grade",
]
