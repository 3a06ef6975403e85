"""What the memory notebook adds up, against sums by hand."""

import pytest

from labkit.config import PRESETS, TrainConfig
from labkit.memory import STATES, Instant, MemoryReport, predict
from labkit.workbook import memory
from labkit.workbook.exercises import find, grade


@pytest.mark.parametrize("name", list(STATES))
def test_bytes_per_parameter_add_up_to_those_of_the_recipe(name):
    parts = memory.bytes_per_param(STATES[name])

    assert sum(parts.values()) == STATES[name].bytes_per_param


def test_bars_of_states_have_the_books_colours():
    bars = memory.state_bars({"weights": 2, "master": 4, "moments": 4})

    assert [(bar.name, bar.meaning) for bar in bars] == [
        ("weights", "weights"),
        ("master", "optimizer"),
        ("moments", "optimizer"),
    ]


def test_every_module_that_keeps_something_has_a_kind():
    train = TrainConfig(micro_batch=2, seq_len=32, precision="bf16")
    by_module = predict(PRESETS["tiny"], train).by_module
    kinds = memory.by_kind(by_module)

    assert sum(kinds.values()) == sum(by_module.values())
    assert [*kinds] == [*memory.KINDS]  # tiny has something of each


def test_differences_show_what_one_side_lacks():
    rows = memory.difference_rows({"a": 3, "b": 1}, {"a": 3, "c": 2})

    assert [row["part"] for row in rows] == ["a", "b", "c"]
    assert [row["difference"] for row in rows] == [0, 1, -2]


def test_an_instant_is_found_by_its_name_and_its_parts_in_order():
    first, last = (
        Instant(name="forward", by_part={"activations": n, "weights": 1})
        for n in (2, 3)
    )
    report = MemoryReport(timeline=(first, last))

    assert [*memory.at(report, "forward").items()] == [
        ("weights", 1),
        ("activations", 3),
    ]


@pytest.mark.parametrize("plan", [{}, {"pp": 16, "dp": 16}, "pp=16"])
def test_what_is_no_plan_for_the_cards_is_told_what_one_looks_like(plan):
    line = grade(find("v3_on_few_cards"), plan).line

    assert "a plan must be a dict with a Layout in it; got" in line
    assert "Give dict(layout=Layout(pp=…, dp=…, ep=…), zero=…)." in line
