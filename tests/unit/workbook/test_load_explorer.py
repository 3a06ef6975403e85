"""The load explorer: its numbers, its extremes, and its figures."""

import itertools
import time

import numpy as np
import pytest
import torch

from labkit.parallel import balance_experts
from labkit.training import RECIPES
from labkit.workbook.crowd import steer
from labkit.workbook.figures.balance import load_map
from labkit.workbook.published import published
from labkit.workbook.widgets.load_explorer import (
    GAMMAS,
    LIMITS,
    SETTINGS,
    SKEWS,
    SPARES,
    LoadControls,
    LoadPlan,
    describe,
    draw,
)

START = LoadControls().value
TRAINING, SERVING = SETTINGS


def at(**changes):
    return START | changes


def test_it_starts_where_deepseek_v3_trains():
    setting = SETTINGS[TRAINING]

    assert (START["setting"], START["gamma"], START["n_limited"]) == (TRAINING, 1, 4)
    assert f"{RECIPES['v3-671b'].n_steps:,} steps" in setting.words
    assert RECIPES["v3-671b"].bias_update_rate == setting.gamma / 1000


def test_serving_has_the_spare_slots_that_are_published():
    setting = SETTINGS[SERVING]

    assert setting.spare * setting.n_gpus == published("v3-671b", "redundant experts")
    assert f"{setting.spare * setting.n_gpus} spare slots" in setting.words


def test_choosing_a_setting_moves_the_others_and_speaks_once():
    controls, heard = LoadControls(), []
    controls.controls["is_global"].value = True
    controls.observe(heard.append, "value")
    controls.controls["setting"].value = SERVING

    assert controls.value == {
        "setting": SERVING,
        "gamma": 0,
        "skew": 50,
        "n_limited": 4,
        "spare": 1,
        "is_global": False,
    }
    assert len(heard) == 1


def test_numbers_are_those_of_the_crowd_and_the_balancer():
    crowd = steer(0.5, 0.003, 2)
    load = torch.from_numpy(crowd.load)[None]
    placed = balance_experts(load, n_replicas=384, n_gpus=64)
    text = describe(at(gamma=3, skew=50, n_limited=2, spare=2, is_global=True))

    assert f"to {crowd.history[-1][1]:.1f} times the mean" in text
    assert f"{placed.imbalance(load).item():.2f} times placed globally with 128" in text


def test_by_node_no_token_goes_beyond_the_node_limit():
    for n_limited in LIMITS:
        text = describe(at(n_limited=n_limited, gamma=0))
        reached = float(text.split("A token goes to ")[1].split()[0])
        assert reached <= n_limited


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_control_changes_the_sentence(setting):
    values = {
        "gamma": GAMMAS,
        "skew": SKEWS,
        "n_limited": LIMITS,
        "spare": SPARES[:3],
        "is_global": (False, True),
    }
    assert values.keys() == START.keys() - {"setting"}
    for name, several in values.items():
        texts = {describe(at(setting=setting) | {name: value}) for value in several}
        assert len(texts) == len(several), name


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_combination_of_extremes_is_an_error(setting):
    ends = {
        "gamma": (0, 100),
        "skew": (0, 200),
        "n_limited": (1, 8),
        "spare": (0, 8),
        "is_global": (False, True),
    }
    for values in itertools.product(*ends.values()):
        plan = at(setting=setting) | dict(zip(ends, values, strict=True))
        text = describe(plan)
        assert "nan" not in text
        assert "e+" not in text
    draw(plan)


def test_the_figure_names_both_ways_to_place():
    plan = at(setting=SERVING, gamma=0, skew=50, spare=1)
    _, right = draw(plan).axes
    names = [text.get_text() for text in right.texts]

    fresh, placed = LoadPlan(**plan).place(LoadPlan(**plan).crowd)
    load = torch.from_numpy(LoadPlan(**plan).crowd.load)[None]
    assert names == [
        f"as they come: the slowest has {fresh.imbalance(load).item():.2f}",
        f"placed by node: the slowest has {placed.imbalance(load).item():.2f}",
    ]


@pytest.mark.usefixtures("unchecked")
def test_a_move_is_answered_at_once():
    seconds = []
    for skew in (25, 75, 150):
        plan = at(skew=skew, gamma=10)
        start = time.process_time()
        describe(plan), draw(plan)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.15


def test_a_map_shows_every_expert_and_step_and_where_something_changed():
    loads = np.array([[4.0, 0.0], [3.0, 1.0], [2.0, 2.0]])
    upper, lower, _ = load_map(loads, title="t", change=2, note="n").axes

    assert upper.images[0].get_array().tolist() == [[2.0, 1.5, 1.0], [0.0, 0.5, 1.0]]
    assert list(lower.lines[0].get_ydata()) == [2.0, 1.5, 1.0]
    assert list(lower.lines[-1].get_xdata()) == [2.5, 2.5]
