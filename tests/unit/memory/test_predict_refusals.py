"""What `predict` refuses, and the sentences in which it does."""

from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory.predict import predict

TINY = PRESETS["tiny"]
DENSE = replace(TINY, moe=None, n_dense_layers=0)
TRAIN = TrainConfig(micro_batch=1, global_batch=8, seq_len=64)

EVEN = [[16] * 8, [16] * 8, [16] * 8, [15, 17] + [16] * 4 + [15] * 2]
"""A load that TINY may have: 64 tokens choose 2 of 8 experts; 63 in its MTP module."""


def with_row(row):
    return [row, *EVEN[1:]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"cfg": "tiny"},
            "cfg must be of type ModelConfig; got 'tiny'. Build it first: "
            "cfg=ModelConfig(...).",
        ),
        (
            {"train": None},
            "train must be of type TrainConfig; got None. Build it first: "
            "train=TrainConfig(...).",
        ),
        *[
            (
                {"layout": layout},
                f"layout must be of type Layout or None; got {layout!r}. Build it "
                "first: layout=Layout(...).",
            )
            for layout in (0, "", [])
        ],
        (
            {"states": "megatron"},
            "states must be the dtypes of what lasts, of type States; got 'megatron'. "
            "Set states=STATES['megatron'], or build States(...).",
        ),
        (
            {"states": 16},
            "states must be the dtypes of what lasts, of type States; got 16. "
            "Set states=STATES['trainer'], or build States(...).",
        ),
        (
            {"zero": 1.0},
            "zero must be 0, 1, 2 or 3: ZeRO shares out nothing, optimizer states, "
            "gradients too, weights too; got 1.0. Set zero=0 or another of these.",
        ),
        (
            {"recompute": None},
            "recompute must be one of 'none', 'full', 'every_k', 'selective', "
            "'attention', 'moe'; got None. Set recompute='none' or another of these.",
        ),
        (
            {"recompute": ["none"]},
            "recompute must be one name, or one for each of 5 blocks (layers, then "
            "MTP modules); got 1 names. Pass 5.",
        ),
        (
            {"layers_per_stage": 3},
            "layers_per_stage must list the layers of each virtual stage; got 3. Give "
            "a list, as layers_per_stage=[2, 2], or leave it out for an even split.",
        ),
        (
            {"layers_per_stage": "4"},
            "layers_per_stage must list the layers of each virtual stage; got '4'. "
            "Give a list, as layers_per_stage=[2, 2], or leave it out for an even "
            "split.",
        ),
        (
            {"layers_per_stage": [4.0]},
            "layers_per_stage[0] must be a whole number of at least 0; got 4.0. Set "
            "layers_per_stage[0] to 0 or more.",
        ),
        (
            {"train": replace(TRAIN, seq_len=257)},
            "seq_len must be at most the model's max_seq_len; got 257 and 256. Set "
            "seq_len=256, or build the model for longer sequences.",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_an_argument_of_another_kind_is_refused(options, sentence):
    # A valid call first: what is remembered of it must not answer for another.
    predict(TINY, TRAIN, zero=1, layers_per_stage=[4])
    with pytest.raises(ValueError) as error:
        predict(**({"cfg": TINY, "train": TRAIN} | options))

    assert str(error.value) == sentence


@pytest.mark.parametrize("device", [None, 0, torch.device("cpu")])
@pytest.mark.usefixtures("unchecked")
def test_a_device_is_a_name(device):
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, device=device)

    assert f"; got {device!r}. Set device='gpu'" in str(error.value)


@pytest.mark.parametrize("cfg", [TINY, DENSE], ids=["experts", "dense"])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"routing": "even"},
            "routing must be one of 'paper', 'physical'; got 'even'. Set "
            "routing='paper' or another of these.",
        ),
        *[
            (
                {"imbalance": imbalance},
                f"imbalance must be at least 1 and finite; got {imbalance!r}. Set "
                "imbalance to 1 or more.",
            )
            for imbalance in (-3, 0.99, True, float("inf"), "2")
        ],
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_rows_are_spread_as_they_can_be_also_where_none_are(cfg, options, sentence):
    with pytest.raises(ValueError) as error:
        predict(cfg, TRAIN, **options)

    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("layout", "most"), [(Layout(), "1"), (Layout(dp=2, ep=2), "2")]
)
def test_the_busiest_rank_computes_no_more_than_all_rows(layout, most):
    predict(TINY, TRAIN, layout, imbalance=float(most))
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, layout, imbalance=2.5)

    assert str(error.value) == (
        f"imbalance must be at most {most}, when one of ep={layout.ep} ranks computes "
        f"all that tokens can send to it; got 2.5. Set imbalance={most} or less, or "
        "spread the experts over more ranks."
    )


def test_a_rank_with_fewer_experts_than_a_token_chooses_receives_less_than_all():
    # One of 8 experts on each of 8 ranks receives at most 64 of 64 * 2 pairs.
    layout = Layout(dp=8, ep=8)
    predict(TINY, TRAIN, layout, imbalance=4.0)
    with pytest.raises(ValueError, match=r"at most 4\.0, when one of ep=8 .* got 4\.1"):
        predict(TINY, TRAIN, layout, imbalance=4.1)


OF_MICRO_BATCH = "Give LossParts.load.tolist() of one micro-batch, or leave load out."


@pytest.mark.parametrize(
    ("load", "sentence"),
    [
        *[
            (
                load,
                "load must list the tokens of each expert, a row per router; got a "
                f"{name}. {OF_MICRO_BATCH}",
            )
            for load, name in (
                (5, "int"),
                ("full", "str"),
                ([1, 2], "list"),
                (torch.tensor(EVEN), "Tensor"),
            )
        ],
        (
            EVEN[:2],
            "load must have a row for each router of the model, MTP's last, which are "
            f"4; got 2. {OF_MICRO_BATCH}",
        ),
        (
            with_row([64]),
            "load[0] must have a number for each of 8 routed experts; got 1. Give that "
            "of each, 0 included.",
        ),
        (
            with_row([-1] + [16] * 7),
            "load[0][0] must be a whole number of at least 0; got -1. Set load[0][0] "
            "to 0 or more.",
        ),
        (
            with_row([17] + [16] * 7),
            "load[0] must be that of one micro-batch, whose 64 tokens choose 2 experts "
            "each: at most 128 in all, and 64 of one expert; got 129, and 17. Give the "
            "last micro-batch's, not the sum of a step's.",
        ),
        (
            with_row([65] + [9] * 7),
            "load[0] must be that of one micro-batch, whose 64 tokens choose 2 experts "
            "each: at most 128 in all, and 64 of one expert; got 128, and 65. Give the "
            "last micro-batch's, not the sum of a step's.",
        ),
        (
            [EVEN[0]] * 4,
            "load[3] must be that of one micro-batch, whose 63 tokens choose 2 experts "
            "each: at most 126 in all, and 63 of one expert; got 128, and 16. Give the "
            "last micro-batch's, not the sum of a step's.",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_load_that_the_routers_cannot_have_is_refused(load, sentence):
    predict(TINY, TRAIN, load=EVEN)
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, load=load)

    assert str(error.value) == sentence


def test_a_dense_model_has_the_load_of_no_router():
    assert predict(DENSE, TRAIN, load=[]) == predict(DENSE, TRAIN)
    with pytest.raises(ValueError, match="row for each router .*, which are 0; got 4."):
        predict(DENSE, TRAIN, load=EVEN)


def test_a_load_leaves_nothing_for_routing_and_imbalance_to_say():
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, load=EVEN, routing="paper")

    assert str(error.value) == (
        "load says already what each expert computes; got also routing='paper' and "
        "imbalance=1.0. Leave out these, or load."
    )
