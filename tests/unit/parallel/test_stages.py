"""The cut into pipeline stages, against all cuts there are."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from labkit.config import PRESETS, ModelConfig
from labkit.config.counts import flops_per_token
from labkit.parallel.stages import (
    cut_layers,
    layer_flops,
    layers_of_stages,
    output_flops,
    stages_of_rank,
)

SMALL = PRESETS["small"]


def works(cfg: ModelConfig, cut: tuple[int, ...]) -> list[int]:
    """Return the work of each stage."""
    costs = layer_flops(cfg)
    stops = [sum(cut[: index + 1]) for index in range(len(cut))]
    work = [sum(costs[a:b]) for a, b in pairwise([0, *stops])]
    return [*work[:-1], work[-1] + output_flops(cfg)]


def all_cuts(n_layers: int, n_stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in pairwise([0, *inner, n_layers]))
        for inner in combinations(range(1, n_layers), n_stages - 1)
    ]


@pytest.mark.parametrize("name", ["small", "v2-lite-16b", "v3-671b"])
def test_the_work_of_layers_and_head_is_that_of_a_forward_pass(name):
    cfg = replace(PRESETS[name], mtp=None)
    seq_len = 1024
    ours = sum(layer_flops(cfg, seq_len)) + output_flops(cfg, seq_len)
    theirs = flops_per_token(cfg, seq_len, training=False)
    assert ours == pytest.approx(theirs, rel=1e-3)  # norms are counted in neither


def test_a_module_of_mtp_is_a_layer_its_projection_and_the_head_once_more():
    alone = replace(SMALL, mtp=None)
    block, head = layer_flops(SMALL)[-1], 2 * SMALL.vocab_size * SMALL.dim
    assert output_flops(alone) == head
    assert output_flops(SMALL) == head + block + head + 4 * SMALL.dim**2


@pytest.mark.parametrize("n_stages", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("vocab_size", [100, 5000, 50000])
def test_no_other_cut_has_less_work_in_its_fullest_stage(n_stages, vocab_size):
    cfg = replace(SMALL, n_layers=11, n_dense_layers=4, vocab_size=vocab_size)

    def unevenness(cut: tuple[int, ...]) -> tuple[int, int]:
        work = works(cfg, cut)
        return max(work), sum(each**2 for each in work)

    cut = cut_layers(cfg, n_stages)
    best = min(map(unevenness, all_cuts(11, n_stages)))
    assert unevenness(cut) == pytest.approx(best)


def test_the_full_model_is_cut_in_a_blink():
    assert sum(cut_layers(PRESETS["v3-671b"], 61)) == 61


def test_layers_of_stages_follow_each_other():
    assert layers_of_stages(SMALL, 3, [3, 0, 3]) == (
        range(3),
        range(3, 3),
        range(3, 6),
    )


def test_stages_lie_in_rounds_or_in_a_v():
    assert stages_of_rank("gpipe", 3, 2) == (2,)
    assert stages_of_rank("zero-bubble", 3, 2, vpp=3) == (2, 5, 8)
    assert stages_of_rank("zbv", 3, 2) == (2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cut_layers(SMALL, 7),
            "a pipeline needs a layer for each of its pp * vpp stages; got 6 layers "
            "for 7 stages. Lower pp or vpp, or name layers_per_stage, where 0 is "
            "allowed.",
        ),
        (
            lambda: layers_of_stages(SMALL, 2, [3, 2]),
            "layers_per_stage must name the layers of each stage, which are pp * vpp "
            "= 2, and sum to n_layers=6; got [3, 2], 2 numbers that sum to 5. Correct "
            "it, or leave it out for a cut by work.",
        ),
        (
            lambda: layers_of_stages(SMALL, 2, [7, -1]),
            "layers_per_stage[1] must be a whole number of at least 0; got -1. Set "
            "layers_per_stage[1] to 0 or more.",
        ),
        (
            lambda: stages_of_rank("zbv", 2, 0, vpp=1),
            "schedule='zbv' needs vpp=2; got vpp=1. Set vpp=2 or leave it out.",
        ),
        (
            lambda: cut_layers(SMALL, 2, seq_len=0),
            "seq_len must be a whole number of at least 1; got 0. Set seq_len to 1 or "
            "more.",
        ),
    ],
)
def test_a_cut_that_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
