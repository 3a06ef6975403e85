"""What would make a step fit: against predictions of each, and against trying all."""

from dataclasses import replace

import pytest

from labkit.config import PRESETS, GQAConfig, Layout, TrainConfig
from labkit.memory import RECOMPUTE_POLICIES, STATES, fits, predict
from labkit.memory.cost import recompute_cost
from labkit.memory.remedies import Fit, remedies, what_fits
from labkit.memory.ways import KINDS, UNCERTAINTY
from labkit.training import RECIPES

MIB, GIB = 2**20, 2**30
TINY = PRESETS["tiny"]
DENSE = replace(
    TINY,
    n_layers=2,
    n_dense_layers=0,
    moe=None,
    mtp=None,
    attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=16),
)
TRAIN = TrainConfig(micro_batch=4, global_batch=8, seq_len=128)
V3, V3_TRAIN = PRESETS["v3-671b"], RECIPES["v3-671b"]
V3_LAYOUT = Layout(pp=16, dp=128, ep=64)


@pytest.mark.usefixtures("unchecked")  # of very many predictions
@pytest.mark.parametrize("capacity", [10 * MIB, 40 * MIB, 50 * MIB])
def test_a_remedy_is_what_predict_says_of_its_arguments(capacity):
    found = remedies(TINY, TRAIN, capacity=capacity)
    present = predict(TINY, TRAIN).peak
    assert found
    for remedy in found:
        peak = predict(TINY, **({"train": TRAIN} | remedy.arguments)).peak
        assert remedy.peak == peak < present
        assert remedy.fits == (peak * (1 + UNCERTAINTY) <= capacity)


def test_those_that_fit_come_first_and_then_those_that_give_up_least():
    found = remedies(TINY, TRAIN, capacity=48 * MIB)
    assert [remedy.fits for remedy in found] == [True, True, True, False, False]
    assert [remedy.level for remedy in found[:3]] == [0, 0, 3]
    assert found[0].extra_time < found[1].extra_time


def test_a_smaller_micro_batch_keeps_the_global_batch_and_halves_no_more_than_needed():
    train = replace(TRAIN, micro_batch=8)
    sized = {
        size: predict(DENSE, replace(train, micro_batch=size)).peak for size in (4, 2)
    }
    for size, peak in sized.items():
        found = remedies(DENSE, train, capacity=int(peak * 1.06), kinds=["micro_batch"])
        assert found[0].arguments == {"train": replace(train, micro_batch=size)}
        assert found[0].fits
        assert "the same global_batch from" in found[0].cost


def test_a_micro_batch_takes_a_share_of_every_ranks_sequences():
    train = TrainConfig(micro_batch=4, global_batch=24, seq_len=128)
    found = remedies(
        DENSE, train, Layout(dp=2), capacity=1 * MIB, kinds=["micro_batch"]
    )
    # A rank has 12 sequences, which 3 divides as well; 1 needs least.
    assert found[0].change == "micro_batch=1"
    assert found[0].cost.startswith("the same global_batch from 12 of them; ")
    assert " time or more; " in str(found[0])


@pytest.mark.parametrize("capacity", [50 * MIB, 54 * MIB, 66 * MIB])
def test_recompute_is_at_least_as_cheap_as_every_policy_that_fits(capacity):
    train = replace(TRAIN, micro_batch=8)
    (found,) = remedies(TINY, train, capacity=capacity, kinds=["recompute"])
    costs = [
        recompute_cost(TINY, train, policy)
        for policy in RECOMPUTE_POLICIES
        if predict(TINY, train, recompute=policy).peak * (1 + UNCERTAINTY) <= capacity
    ]
    assert found.fits and found.extra_time <= min(costs) + 1e-9
    assert found.extra_time == pytest.approx(
        recompute_cost(TINY, train, found.arguments["recompute"])
    )
    assert found.change == f"recompute={found.arguments['recompute']!r}"


def test_policies_of_many_blocks_are_counted():
    options = {"states": STATES["megatron"], "zero": 1, "kinds": ["recompute"]}
    (found,) = remedies(V3, V3_TRAIN, V3_LAYOUT, "gpu", capacity=75 * GIB, **options)
    policies = found.arguments["recompute"]
    assert len(policies) == 62 and found.fits
    assert f"{policies.count('full')} x 'full'" in found.change


def test_the_extra_time_of_a_policy_is_that_beside_the_present_one():
    options = {"capacity": 1, "kinds": ["recompute"], "recompute": "selective"}
    (found,) = remedies(TINY, TRAIN, **options)
    full, selective = (
        1 + recompute_cost(TINY, TRAIN, policy) for policy in ("full", "selective")
    )
    assert found.change == "recompute='full'"
    assert found.extra_time == pytest.approx(full / selective - 1)


def test_what_does_not_apply_is_left_out():
    train = replace(TRAIN, micro_batch=1, seq_len=16, precision="bf16")
    states = replace(STATES["trainer"], moments="bfloat16")
    options = {"recompute": "full", "states": states, "cached": "fp8"}
    assert remedies(DENSE, train, capacity=1, **options) == ()


def test_a_model_without_experts_is_offered_no_policy_of_theirs():
    everything = remedies(DENSE, TRAIN, capacity=predict(DENSE, TRAIN).peak)
    assert "recompute='moe'" not in {remedy.change for remedy in everything}


@pytest.mark.parametrize(
    ("kind", "changed"),
    {
        "zero": {"zero": 3},
        "expert ranks": {"layout": replace(V3_LAYOUT, ep=128)},
        "stages": {"layout": replace(V3_LAYOUT, pp=32)},
    }.items(),
)
def test_ranks_and_zero_are_offered_where_a_layout_has_room_for_them(kind, changed):
    (found,) = remedies(V3, V3_TRAIN, V3_LAYOUT, "gpu", capacity=GIB, kinds=[kind])
    assert found.arguments == changed
    assert found.extra_time is None
    assert remedies(TINY, TRAIN, capacity=1, kinds=[kind]) == ()


@pytest.mark.usefixtures("unchecked")  # of very many predictions
def test_remedies_are_taken_together_when_none_that_costs_time_alone_fits():
    first, *others = remedies(TINY, TRAIN, capacity=34 * MIB)
    assert first.fits and not any(other.fits for other in others)
    assert first.change.startswith("micro_batch=1 and recompute=")
    assert first.arguments.keys() == {"train", "recompute"}
    alone = {other.change.split("=")[0]: other.peak for other in others}
    assert first.peak < min(alone["micro_batch"], alone["recompute"])


@pytest.mark.usefixtures("unchecked")  # of very many predictions
def test_zero_is_no_higher_than_recompute_beside_it_needs():
    options = {"states": STATES["megatron"], "capacity": 75 * GIB}
    layout = Layout(pp=8, dp=256, ep=32)
    first = remedies(V3, V3_TRAIN, layout, "gpu", **options)[0]
    zero = first.arguments["zero"]
    assert first.fits and "recompute" in first.arguments
    lower = {**first.arguments, "zero": zero - 1, "states": STATES["megatron"]}
    report = predict(V3, V3_TRAIN, layout, "gpu", **lower)
    assert fits(report, 75 * GIB, layout=layout) != "fits"


@pytest.mark.usefixtures("unchecked")  # of very many predictions
def test_on_a_gpu_a_remedy_fits_with_the_most_of_all_overheads():
    options = {"states": STATES["megatron"], "zero": 1}
    found = remedies(V3, V3_TRAIN, V3_LAYOUT, "h800", capacity=80 * GIB, **options)
    assert any(remedy.fits for remedy in found)
    for remedy in found:
        arguments = {"layout": V3_LAYOUT, **options, **remedy.arguments}
        report = predict(V3, device="h800", **({"train": V3_TRAIN} | arguments))
        if remedy.fits:
            assert fits(report, 80 * GIB, layout=arguments["layout"]) == "fits"


def test_shorter_sequences_are_round_and_no_shorter_than_a_quarter():
    train = replace(TRAIN, seq_len=250)
    (found,) = remedies(TINY, train, capacity=60 * MIB, kinds=["seq_len"])
    seq_len = found.arguments["train"].seq_len
    assert seq_len % 16 == 0 and found.fits
    longer = predict(TINY, replace(train, seq_len=seq_len + 16)).peak
    assert longer * (1 + UNCERTAINTY) > 60 * MIB
    assert remedies(TINY, train, capacity=34 * MIB, kinds=["seq_len"]) == ()


@pytest.mark.parametrize("capacity", [25 * MIB, 40 * MIB, 70 * MIB])
def test_what_fits_is_the_largest_that_does(capacity):
    def is_within(**changes) -> bool:
        peak = predict(DENSE, replace(TRAIN, **changes)).peak
        return peak * (1 + UNCERTAINTY) <= capacity

    found = what_fits(DENSE, TRAIN, capacity=capacity)
    sizes = [found.micro_batch - 1, found.micro_batch, found.micro_batch + 1]
    lengths = [found.seq_len - 1, found.seq_len, found.seq_len + 1]
    assert [n > 0 and is_within(micro_batch=n, global_batch=2 * n) for n in sizes] == [
        found.micro_batch > 1,
        True,
        False,
    ]
    assert [n <= 256 and is_within(seq_len=n) for n in lengths] == [
        True,
        True,
        False,
    ]


def test_nothing_fits_where_the_weights_do_not():
    assert what_fits(TINY, TRAIN, capacity=1 * MIB) == Fit(None, None)


def test_a_sequence_that_fits_is_cut_evenly_by_context_ranks():
    train = replace(TRAIN, seq_len=96)
    found = what_fits(DENSE, train, Layout(cp=3), capacity=30 * MIB)
    assert found.seq_len % 3 == 0


def message(**options) -> str:
    with pytest.raises(ValueError) as error:
        remedies(TINY, TRAIN, **options)
    return str(error.value)


def test_mistakes_are_named():
    assert message(capacity=0) == (
        "capacity must be a whole number of at least 1; got 0. "
        "Set capacity to 1 or more."
    )
    assert "kinds must be one of" in message(capacity=1, kinds=["more money"])
    assert all(kind in message(capacity=1, kinds=["x"]) for kind in KINDS)
