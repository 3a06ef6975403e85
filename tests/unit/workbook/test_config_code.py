"""Solutions that are configs: shown in few lines, which a learner can run."""

import re
from dataclasses import replace

import pytest

from labkit.config import PRESETS
from labkit.workbook.exercises import find, grade
from labkit.workbook.exercises.handle import solution_text


@pytest.mark.parametrize("name", ["sparse_giant", "smaller_cache"])
def test_a_solution_that_is_a_config_is_shown_as_what_changes_in_a_preset(name):
    spec = find(name)
    code = solution_text(spec)[1]
    start, call = code.split("\n", maxsplit=1)
    namespace = {"PRESETS": PRESETS, "replace": replace}
    exec(start, namespace)

    assert eval(call, namespace) == spec.solution
    assert len(code) < 250


def test_a_goal_can_be_tried_with_the_names_of_its_stub():
    spec = find("sparse_giant")
    namespace = {"PRESETS": PRESETS, "replace": replace}
    exec(spec.stub, namespace)
    fields = dict(
        re.findall(r"^ +(n_\w+|moe_\w+)=(\d+),", solution_text(spec)[1], re.M)
    )
    call = "replace(lite, moe=replace(lite.moe, **values))"  # as the task has it
    namespace["values"] = {name: int(value) for name, value in fields.items()}

    assert call.replace("**values", "…") in spec.task
    assert all(f"`{name}`" in spec.task for name in fields)
    assert grade(spec, eval(call, namespace)).mark == "✓"
