"""What the notebook on layouts makes of what ranks hand back."""

from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS, Layout
from labkit.parallel.communication.count import Traffic
from labkit.parallel.held import Held
from labkit.workbook.layout_runs import (
    FOUR,
    TWO,
    Outcome,
    Training,
    Whole,
    alone,
    equality_rows,
    kept_columns,
    traffic_rows,
)

TRAINING = Training(cfg=PRESETS["tiny"], n_sequences=2, seq_len=16)

WHOLE = Whole(
    losses=(2.0, 1.0), gradients={}, kept=Held(weights=4, gradients=4, moments=8)
)
OUTCOME = Outcome(
    losses=(2.0, 1.0),
    difference=3e-7,
    kept=Held(weights=2, gradients=2, moments=4),
    traffic=(
        Traffic("all_gather", "dp", 2, 1, 300, 2, 300),
        Traffic("all_reduce", "dp", 2, 3, 50_000, 6, 50_000),
        Traffic("all_reduce", "pp", 2, 1, 300, 2, 300),
        Traffic("send", "pp", 2, 4, 36_000, 4, 36_000),
    ),
)


@pytest.fixture(scope="module")
def whole():
    return alone(TRAINING)


def test_one_process_trains_and_keeps_16_bytes_a_parameter(whole):
    n_params = sum(p.numel() for p in TRAINING.model().parameters())
    kept = whole.kept

    assert whole.losses[1] < whole.losses[0]
    assert (kept.weights, kept.gradients) == (4 * n_params, 4 * n_params)
    assert kept.moments == 8 * n_params


def test_gradients_handed_to_ranks_are_those_of_the_first_step(whole):
    model, batch = TRAINING.model(), TRAINING.batches()[0]
    model.loss(batch.tokens, batch.targets).total.backward()

    assert whole.gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(whole.gradients[name], parameter.grad)


def test_the_same_losses_and_gradients_are_called_equal():
    (row,) = equality_rows([{"data": OUTCOME}], WHOLE)

    assert row["losses equal to 1e-5"]
    assert row["gradients equal to 1e-5"]
    assert row["largest difference of a gradient"] == "3.0e-07"


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({"losses": (2.0, 1.0001)}, "losses equal to 1e-5"),
        ({"difference": 1e-4}, "gradients equal to 1e-5"),
    ],
)
def test_what_differs_is_not_called_equal(changes, column):
    (row,) = equality_rows([{"data": replace(OUTCOME, **changes)}], WHOLE)

    assert not row[column]


def test_a_cut_is_as_large_as_its_fullest_rank():
    fuller = replace(OUTCOME, kept=Held(weights=3, gradients=3, moments=6))
    columns = kept_columns([{"pipeline": OUTCOME}, {"pipeline": fuller}], WHOLE)

    assert columns == {
        "one process": {"weights": 4, "gradients": 4, "moments": 8},
        "pipeline": {"weights": 3, "gradients": 3, "moments": 6},
    }


def test_messages_of_a_few_numbers_are_left_out_of_the_table_and_not_of_the_sum():
    rows = traffic_rows({"pipeline": OUTCOME})

    assert [row["what"] for row in rows] == ["all-reduce", "send"]
    assert [row["calls"] for row in rows] == [4, 4]  # along all axes
    assert [row["sent (kB)"] for row in rows] == [50, 40]
    assert OUTCOME.sent_bytes == 86_600


def test_every_way_takes_the_ranks_it_is_for_and_has_a_name_of_its_own():
    assert {way.layout.n_ranks for way in TWO} == {2}
    assert {way.layout.n_ranks for way in FOUR} == {4}
    assert FOUR[0].layout == Layout(pp=2, dp=2, ep=2)
    assert len({way.name for way in TWO + FOUR}) == len(TWO) + len(FOUR)
