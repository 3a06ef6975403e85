"""Every rule of a model or layout: what it says when it is broken."""

import dataclasses
import re
import typing
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import (
    PRESETS,
    GQAConfig,
    Layout,
    MLAConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
    TrainConfig,
    model_from_dict,
    model_to_dict,
)
from labkit.config.counts import (
    attention_flops_per_token,
    attention_params,
    ffn_params,
    moe_params,
    router_params,
)

MLA = MLAConfig(n_heads=4)
GQA = GQAConfig(n_heads=8, n_kv_heads=2)
MOE = MoEConfig(n_routed_experts=12, n_activated_experts=4, moe_inter_dim=8)
TINY = PRESETS["tiny"]
TRAIN = TrainConfig()

BROKEN = [
    (
        MLA,
        {"n_heads": 0},
        "n_heads must be a whole number of at least 1; got 0. Set n_heads to 1 or "
        "more.",
    ),
    (
        MLA,
        {"q_lora_rank": -1},
        "q_lora_rank must be a whole number of at least 1; got -1. Set q_lora_rank to "
        "1 or more.",
    ),
    (
        MLA,
        {"v_head_dim": True},
        "v_head_dim must be a whole number of at least 1; got True. Set v_head_dim to "
        "1 or more.",
    ),
    (
        MLA,
        {"qk_rope_head_dim": 63},
        "qk_rope_head_dim must be even, because RoPE rotates pairs; got 63. Set "
        "qk_rope_head_dim=64.",
    ),
    (
        GQA,
        {"head_dim": 5},
        "head_dim must be even, because RoPE rotates pairs; got 5. Set head_dim=6.",
    ),
    (
        GQA,
        {"n_kv_heads": 6},
        "n_kv_heads must divide n_heads, because each group of query heads shares one "
        "key; got 6 and 8. Set n_kv_heads=2.",
    ),
    (
        MOE,
        {"score_func": "tanh"},
        "score_func must be one of 'sigmoid', 'softmax'; got 'tanh'. Set "
        "score_func='sigmoid' or another of these.",
    ),
    (
        MOE,
        {"group_score": "mean"},
        "group_score must be one of 'top2', 'max'; got 'mean'. Set "
        "group_score='top2' or another of these.",
    ),
    (
        MOE,
        {"n_shared_experts": -1},
        "n_shared_experts must be a whole number of at least 0; got -1. Set "
        "n_shared_experts to 0 or more.",
    ),
    (
        MOE,
        {"balance_loss_weight": -0.5},
        "balance_loss_weight must be at least 0 and finite; got -0.5. Set "
        "balance_loss_weight to 0 or more.",
    ),
    (
        MOE,
        {"route_scale": float("nan")},
        "route_scale must be above 0 and finite; got nan. Set route_scale to a number "
        "above 0.",
    ),
    (
        MOE,
        {"has_bias": 1},
        "has_bias must be True or False; got 1. Set has_bias to one of these.",
    ),
    (
        MOE,
        {"n_activated_experts": 13},
        "n_activated_experts must be at most n_routed_experts; got 13 of 12. Set "
        "n_activated_experts=12 or less.",
    ),
    (
        MOE,
        {"n_expert_groups": 8, "n_limited_groups": 2},
        "n_expert_groups must divide n_routed_experts; got 8 and 12. Set "
        "n_expert_groups=4.",
    ),
    (
        MOE,
        {"n_expert_groups": 3, "n_limited_groups": 4},
        "n_limited_groups must be at most n_expert_groups; got 4 of 3. Set "
        "n_limited_groups=3 or less.",
    ),
    (
        MOE,
        {"n_expert_groups": 4, "n_limited_groups": 1},
        "n_limited_groups must leave at least n_activated_experts to choose from; 1 "
        "groups of 3 hold 3, but 4 are activated. Set n_limited_groups=2 or more.",
    ),
    (
        RopeConfig(),
        {"rope_theta": 1.0},
        "rope_theta must be above 1 and finite; got 1.0. Set rope_theta to a number "
        "above 1.",
    ),
    (
        RopeConfig(),
        {"rope_factor": 0.5},
        "rope_factor must be at least 1 and finite; got 0.5. Set rope_factor to 1 or "
        "more.",
    ),
    (
        RopeConfig(),
        {"beta_fast": 1.0},
        "beta_fast must be above beta_slow, because fast dimensions keep their "
        "frequency; got 1.0 and 1.0. DeepSeek-V3 has 32 and 1.",
    ),
    (
        RopeConfig(),
        {"original_seq_len": 0},
        "original_seq_len must be a whole number of at least 1; got 0. Set "
        "original_seq_len to 1 or more.",
    ),
    (
        MTPConfig(),
        {"depth": 0},
        "depth must be a whole number of at least 1; got 0. Set depth to 1 or more.",
    ),
    (
        MTPConfig(),
        {"loss_weight": -0.1},
        "loss_weight must be at least 0 and finite; got -0.1. Set loss_weight to 0 or "
        "more.",
    ),
    (
        TINY,
        {"vocab_size": 0},
        "vocab_size must be a whole number of at least 1; got 0. Set vocab_size to 1 "
        "or more.",
    ),
    (
        TINY,
        {"n_dense_layers": 5},
        "n_dense_layers must lie between 0 and n_layers=4; got 5. Set "
        "n_dense_layers=4 or less.",
    ),
    (
        TINY,
        {"norm_eps": 0.0},
        "norm_eps must be above 0 and finite; got 0.0. Set norm_eps to a number above "
        "0.",
    ),
    (
        TINY,
        {"init_std": -1.0},
        "init_std must be above 0 and finite; got -1.0. Set init_std to a number above "
        "0.",
    ),
    (
        TINY,
        {"n_dense_layers": 2.0},
        "n_dense_layers must be a whole number of at least 0; got 2.0. Set "
        "n_dense_layers to 0 or more.",
    ),
    (
        TINY,
        {"moe": 3},
        "moe must be of type MoEConfig or None; got 3. Build it first: "
        "moe=MoEConfig(...).",
    ),
    (
        TINY,
        {"rope": None},
        "rope must be of type RopeConfig; got None. Build it first: "
        "rope=RopeConfig(...).",
    ),
    (
        Layout(),
        {"tp": 0},
        "tp must be a whole number of at least 1; got 0. Set tp to 1 or more.",
    ),
    (
        Layout(dp=2),
        {"ep": 4},
        "ep must divide dp * cp * tp, because experts are spread over the ranks that "
        "hold one stage; got ep=4 and 2 * 1 * 1 = 2. Set dp=4 or another multiple.",
    ),
]


@pytest.mark.parametrize(
    ("valid", "change", "message"),
    BROKEN,
    ids=[f"{type(valid).__name__}-{next(iter(c))}" for valid, c, _ in BROKEN],
)
def test_a_broken_rule_says_the_value_and_the_fix(unchecked, valid, change, message):
    with pytest.raises(ValueError) as caught:
        replace(valid, **change)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("valid", "change"), [(valid, change) for valid, change, _ in BROKEN]
)
def test_where_the_fix_is_an_assignment_it_works(unchecked, valid, change):
    with pytest.raises(ValueError) as caught:
        replace(valid, **change)
    fix = re.search(r"Set (\w+)=(\d+)", str(caught.value))
    if fix:
        fixed = replace(valid, **change | {fix[1]: int(fix[2])})
        assert getattr(fixed, fix[1]) == int(fix[2])


WRONG = {
    int: [True, 2.0, "2", -1, float("nan"), float("inf")],
    float: [True, "1.0", -1.0, float("nan"), float("inf"), 10**400],
    bool: [0, 1, "true"],
    str: ["", 3, ["mla"]],
}
"""By the type of a field, values that it must refuse; None comes on top."""

EVERY_FIELD = [
    pytest.param(config, field.name, id=f"{type(config).__name__}-{field.name}")
    for config in [TINY, MLA, GQA, MOE, RopeConfig(), MTPConfig(), Layout(), TRAIN]
    for field in dataclasses.fields(config)
]


def wrong_values(hint) -> list:
    """Return what a field of this type must refuse; a part is refused any number."""
    is_literal = typing.get_origin(hint) is typing.Literal
    kinds = [str] if is_literal else typing.get_args(hint) or [hint]
    absent = [] if type(None) in kinds else [None]
    kind = next(kind for kind in kinds if kind is not type(None))
    return WRONG.get(kind, [3, {}, "mla"]) + absent


@pytest.mark.parametrize(("config", "name"), EVERY_FIELD)
def test_every_field_refuses_other_types_and_what_is_not_finite(
    unchecked, config, name
):
    hint = typing.get_type_hints(type(config))[name]

    for value in wrong_values(hint):
        with pytest.raises(ValueError) as caught:
            replace(config, **{name: value})
        message = str(caught.value)
        assert message.startswith(f"{name} must be ")
        assert f"; got {value!r}. " in message


@pytest.mark.parametrize("seq_len", [-1, 0, 4096.0, True, None, float("nan")])
def test_flops_of_no_sequence_are_refused(unchecked, seq_len):
    for answer in (TINY.flops_per_token, partial(attention_flops_per_token, TINY)):
        with pytest.raises(ValueError) as caught:
            answer(seq_len)
        assert str(caught.value) == (
            f"seq_len must be a whole number of at least 1; got {seq_len!r}. Set "
            "seq_len to 1 or more."
        )


@pytest.mark.parametrize(
    ("count", "name"),
    [
        (lambda: attention_params(MLA, 0), "dim"),
        (lambda: router_params(MOE, -1), "dim"),
        (lambda: moe_params(MOE, 2.0), "dim"),
        (lambda: ffn_params(True, 8), "dim"),
        (lambda: ffn_params(8, -8), "width"),
        (lambda: Layout().check_world(0), "world_size"),
    ],
)
def test_counts_of_nothing_are_refused(unchecked, count, name):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number of at least"):
        count()


@pytest.mark.parametrize("dtype", ["int3", None, ["bfloat16"]])
def test_an_unknown_cache_dtype_is_answered_with_the_known_ones(unchecked, dtype):
    with pytest.raises(ValueError) as caught:
        TINY.kv_bytes_per_token(dtype)
    assert str(caught.value) == (
        "dtype must be one of 'float32', 'bfloat16', 'float16', 'fp8'; got "
        f"{dtype!r}. Set dtype='float32' or another of these."
    )


DESCRIBED = model_to_dict(TINY)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({name: DESCRIBED[name] for name in DESCRIBED if name != "moe"}, "'moe'"),
        (DESCRIBED | {"width": 3}, "unexpected keyword argument 'width'"),
        (DESCRIBED | {"rope": 3}, "must be a mapping, not int"),
        (DESCRIBED | {"attention": {"kind": "nsa"}}, "'nsa'"),
        (3, "'int' object is not subscriptable"),
    ],
)
def test_a_description_of_another_model_is_refused(unchecked, values, fault):
    with pytest.raises(ValueError) as caught:
        model_from_dict(values)
    message = str(caught.value)
    assert message.startswith(
        "a model must be described by the fields that model_to_dict writes; got others"
    )
    assert fault in message
    assert message.endswith("Write it again with this version of labkit.")


@pytest.mark.parametrize("config", [TINY, MLA, GQA, MOE, RopeConfig(), Layout()])
def test_configs_cannot_be_changed_in_place(config):
    name = dataclasses.fields(config)[0].name

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, 1)


def test_a_model_of_dense_layers_only_has_no_expert_layer():
    assert replace(TINY, n_dense_layers=4).n_moe_layers == 0
    assert replace(TINY, moe=None).n_moe_layers == 0


def test_presets_cannot_be_changed_in_place():
    with pytest.raises(TypeError):
        PRESETS["tiny"] = PRESETS["small"]


def test_the_layout_of_deepseek_v3_takes_2048_ranks():
    assert Layout(pp=16, dp=128, ep=64).n_ranks == 2048


DEGREES = st.sampled_from([1, 2, 3, 4, 8])


@given(pp=DEGREES, dp=DEGREES, tp=DEGREES, cp=DEGREES)
def test_a_layout_fits_its_own_number_of_ranks(pp, dp, tp, cp):
    layout = Layout(pp=pp, dp=dp, tp=tp, cp=cp)

    assert layout.n_ranks == pp * dp * tp * cp
    layout.check_world(layout.n_ranks)


@given(pp=DEGREES, dp=DEGREES, tp=DEGREES, cp=DEGREES, world=st.integers(1, 600))
def test_a_layout_that_does_not_fit_says_how_to_make_it_fit(pp, dp, tp, cp, world):
    layout = Layout(pp=pp, dp=dp, tp=tp, cp=cp)
    if layout.n_ranks == world:
        return
    with pytest.raises(ValueError) as caught:
        layout.check_world(world)
    if fix := re.search(r"set dp=(\d+)\.$", str(caught.value)):
        replace(layout, dp=int(fix[1])).check_world(world)
    else:
        assert world % (pp * tp * cp)
        assert str(caught.value).endswith(f"Start a multiple of {pp * tp * cp} ranks.")


def test_a_layout_that_does_not_fit_is_spelled_out():
    with pytest.raises(ValueError) as caught:
        Layout(pp=2, dp=3, tp=2).check_world(16)
    assert str(caught.value) == (
        "pp * dp * cp * tp must equal the number of ranks: 2 * 3 * 1 * 2 = 12, but 16 "
        "ranks are running. With pp=2, cp=1 and tp=2, set dp=4."
    )
