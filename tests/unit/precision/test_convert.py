"""Models converted by the plan: what became FP8, what did not, and why."""

import re
from dataclasses import replace

import pytest
from torch import nn

from labkit.config import PRESETS, GQAConfig, MLAConfig, ModelConfig
from labkit.memory import apply_recompute
from labkit.model import Transformer
from labkit.model.moe import MoE
from labkit.precision.convert import Conversion, ConversionRow, convert
from labkit.precision.linear import Fp8Linear, InFp8
from labkit.precision.plan import plan
from labkit.precision.policies import POLICIES
from labkit.precision.swiglu import Fp8Experts, Fp8MLP

TINY = PRESETS["tiny"]

V3_SHAPED = replace(
    TINY,
    n_layers=2,
    n_dense_layers=1,
    inter_dim=256,
    attention=MLAConfig(
        n_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    moe=replace(
        TINY.moe,
        n_routed_experts=4,
        n_expert_groups=2,
        n_limited_groups=1,
        moe_inter_dim=128,
    ),
)
"""Every part of DeepSeek-V3, no side of a matrix below 128."""

DEEP = replace(V3_SHAPED, n_layers=6)
"""Deep enough for policies that leave layers at the ends as they are."""

DENSE = replace(
    TINY, moe=None, mtp=None, attention=GQAConfig(n_heads=4, n_kv_heads=4, head_dim=32)
)


def shapes(cfg: ModelConfig = V3_SHAPED) -> Transformer:
    return Transformer(cfg, device="meta")


def kinds_of(model: Transformer) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules()]


def names_of(model: Transformer, *kinds: type[nn.Module]) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, kinds)}


def beside_routers(model: Transformer) -> set[str]:
    """Return the modules that read what a router reads, and keeps in BF16."""
    readers = ("experts", "shared_experts.w1", "shared_experts.w3")
    return {f"{moe}.{reader}" for moe in names_of(model, MoE) for reader in readers}


def row_of(conversion: Conversion, name: str) -> ConversionRow:
    (row,) = (row for row in conversion.rows if row.module == name)
    return row


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("hardware", ["cpu", "h800", "a100-80g"])
@pytest.mark.parametrize("cfg", [DEEP, TINY, DENSE], ids=["wide", "narrow", "dense"])
def test_what_is_in_fp8_and_what_it_keeps_are_the_plan_s(policy, hardware, cfg):
    planned = {
        row.operator.name: row.kept
        for row in plan(cfg, policy, hardware).rows
        if row.weight == "e4m3" and not row.operator.is_shared
    }
    model = shapes(cfg)
    planned |= dict.fromkeys(planned.keys() & beside_routers(model), "bf16")
    rows = convert(model, policy, hardware=hardware).rows
    made = names_of(model, Fp8Linear, Fp8Experts)
    assert {name: model.get_submodule(name).recipe.kept for name in made} == planned
    assert {row.module: row.kept for row in rows if row.after == "fp8"} == planned


def test_five_policies_put_something_in_fp8():
    counts = {
        name: sum(row.after == "fp8" for row in convert(shapes(DEEP), name).rows)
        for name in POLICIES
    }
    # Of MLA 5 layers, of an MLP 3, of experts 1: 7 blocks with MTP's, 6 with experts.
    assert counts["deepseek-v3"] == 7 * 5 + 3 + 6 * (1 + 3)
    # The projection of MTP, and the head.
    assert counts["aggressive"] == counts["deepseek-v3"] + 2
    # Layers 2 and 3, without wo and routed experts.
    assert counts["conservative"] == 2 * (4 + 3)
    assert counts["bf16"] == 0


@pytest.mark.parametrize("policy", ["deepseek-v3", "aggressive", "conservative"])
def test_mlps_cache_what_swiglu_reads_where_the_plan_says_so(policy):
    planned = plan(DEEP, policy, "cpu")
    model = shapes(DEEP)
    rows = convert(model, policy).rows
    cached = {row.module for row in rows if row.module.endswith("swiglu") and row.kept}
    assert cached == {
        row.operator.name
        for row in planned.rows
        if row.operator.part == "swiglu" and row.kept == "e4m3"
    }
    holders = names_of(model, Fp8MLP, Fp8Experts)
    assert {f"{name}.swiglu" for name in holders} == cached


def test_recipes_are_powers_of_two_and_keep_the_input_of_wo_in_e5m6():
    model = shapes()
    convert(model)
    parts = [m for m in model.modules() if isinstance(m, InFp8)]
    assert {part.recipe.scale for part in parts} == {"po2"}
    assert {part.recipe.kept for part in parts} == {"e4m3", "e5m6", "bf16"}
    assert model.layers[0].attn.wo.recipe.kept == "e5m6"


@pytest.mark.parametrize(
    "name",
    ["embed", "head", "norm", "layers.1.ffn.gate", "layers.0.attn.core"],
)
def test_what_stays_high_has_the_plan_s_reason(name):
    row = row_of(convert(shapes()), name)
    assert (row.before, row.after, row.backend) == ("high", "high", None)
    assert row.reason == plan(V3_SHAPED, hardware="cpu").row(name).reason


def test_what_is_too_small_for_a_device_stays_high_and_says_so():
    conversion = convert(shapes(TINY), hardware="h800")
    row = row_of(conversion, "layers.0.attn.wq_a")
    assert row.after == "high"
    assert "a side of 48 is less than the 128 of its FP8 units" in row.reason
    assert row_of(conversion, "layers.0.attn.wo").after == "fp8"


@pytest.mark.parametrize(
    ("filter", "reason"),
    [
        ("layers.0.attn", "filter 'layers.0.attn' keeps it high"),
        (["mtp.*", "layers.0.a*"], "filter 'layers.0.a*' keeps it high"),
        (lambda module, name: name == "layers.0.attn", "the filter keeps it high"),
    ],
)
def test_a_filter_keeps_modules_high_with_all_that_is_in_them(filter, reason):
    model = shapes()
    conversion = convert(model, filter=filter)
    assert row_of(conversion, "layers.0.attn.wo").reason == reason
    assert not names_of(model.layers[0].attn, InFp8)
    assert names_of(model.layers[0].ffn, InFp8)
    assert names_of(model.layers[1].attn, InFp8)


def test_a_filter_sees_each_module_by_its_name():
    seen = {}
    model = shapes()
    convert(model, filter=lambda module, name: seen.update({name: module}))
    assert seen == {name: m for name, m in model.named_modules() if name}


def test_a_filter_needs_no_reason_for_what_the_policy_leaves_high():
    row = row_of(convert(shapes(), filter="head"), "head")
    assert row.reason == plan(V3_SHAPED, hardware="cpu").row("head").reason


def test_an_mlp_whose_last_layer_stays_high_caches_nothing_in_fp8():
    model = shapes()
    conversion = convert(model, filter="layers.0.ffn.w2")
    row = row_of(conversion, "layers.0.ffn.swiglu")
    assert row.kept is None
    assert row.reason == "layers.0.ffn.w2 is not in FP8, and neither is what it reads"
    assert not isinstance(model.layers[0].ffn, InFp8)
    assert isinstance(model.layers[0].ffn.w1, Fp8Linear)


def test_an_mlp_whose_first_layer_stays_high_caches_its_inputs_all_the_same():
    model = shapes()
    conversion = convert(model, filter="layers.0.ffn.w1")
    mlp = model.layers[0].ffn
    assert not isinstance(mlp.w1, InFp8)
    assert isinstance(mlp, Fp8MLP)
    assert row_of(conversion, "layers.0.ffn.swiglu").kept == "e4m3"


def test_experts_cache_their_inputs_also_where_a_policy_does_not_ask_for_it():
    keeping = replace(POLICIES["deepseek-v3"], name="keeping", rules=())
    row = row_of(convert(shapes(), keeping), "layers.1.ffn.experts.swiglu")
    assert row.kept == "e4m3"
    assert row.reason.endswith("; but experts in FP8 keep its inputs in FP8")


@pytest.mark.parametrize(
    ("filter", "nearest"),
    [
        (
            ["head", "layers.*.attn.w_o"],
            "'layers.*.attn.w_o', which matches none. The nearest are "
            "'layers.*.attn.wo', ",
        ),
        (
            "layer.1.ffn.gate",
            "'layer.1.ffn.gate', which matches none. The nearest are "
            "'layers.1.ffn.gate', ",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(
    filter, nearest
):
    model = shapes()
    convert(model, "conservative", filter="mtp")
    kinds = kinds_of(model)
    start = f"every pattern of filter must match a module's name; got {nearest}"
    with pytest.raises(ValueError, match=f"^{re.escape(start)}.*: correct it, or leav"):
        convert(model, filter=filter)
    assert kinds_of(model) == kinds


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"hardware": "rtx4090"},
            "hardware must be one whose plan has tiles of 128, which layers multiply "
            "in; got 'rtx4090': FP8 units, but PyTorch's tiles of 128 are for Hopper: "
            "a scale for each row, which labkit has no product for. Set "
            "hardware='cpu', which emulates them on any device, or policy='bf16'.",
        ),
        (
            {"filter": ["head", 3]},
            "filter must be a function, or names of modules as globs; got 3. Pass "
            "names such as 'layers.0.*'.",
        ),
        (
            {"filter": True},
            "filter must be a function, or names of modules as globs; got True. Pass "
            "names such as 'layers.0.*'.",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        convert(shapes(), **given)


def test_a_device_with_other_tiles_may_stay_in_bf16():
    assert convert(shapes(), "bf16", hardware="b200").plan.units.backend == "mxfp8"


@pytest.mark.usefixtures("unchecked")
def test_other_models_are_refused():
    message = (
        "model must be a Transformer of labkit.model, whose operators are known; got a "
        "Linear. Convert the model before it is wrapped or compiled."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        convert(nn.Linear(2, 2))


def test_a_second_conversion_takes_the_place_of_the_first():
    twice, once = shapes(DEEP), shapes(DEEP)
    convert(twice, "aggressive")
    conversion = convert(twice, "conservative")
    wanted = convert(once, "conservative")
    assert kinds_of(twice) == kinds_of(once)
    after = [(row.after, row.kept, row.reason) for row in conversion.rows]
    assert after == [(row.after, row.kept, row.reason) for row in wanted.rows]
    head = row_of(conversion, "head")
    assert (head.before, head.after) == ("fp8", "high")
    middle = row_of(conversion, "layers.2.attn.wq_a")
    assert (middle.before, middle.after) == ("fp8", "fp8")
    conversion.undo()
    assert kinds_of(twice) == kinds_of(shapes(DEEP))


def test_layers_that_read_what_runs_again_keep_it_in_no_other_format():
    model = apply_recompute(shapes(), "selective")
    for _ in range(2):  # a second conversion decides as the first
        conversion = convert(model, "aggressive")
        in_bf16 = {
            name.rpartition(".")[2]
            for name in names_of(model, Fp8Linear, Fp8Experts)
            if model.get_submodule(name).recipe.kept == "bf16"
        }
        assert in_bf16 == {"wq_a", "wkv_a", "w1", "w3", "experts", "eh_proj"}
    reason = row_of(conversion, "layers.0.attn.wq_a").reason
    assert reason.endswith("; its input runs again, and so is not kept in FP8")


def test_what_a_router_keeps_is_kept_in_no_other_format():
    conversion = convert(shapes())
    for name in beside_routers(conversion.model):
        row = row_of(conversion, name)
        assert row.kept == "bf16"
        assert row.reason.endswith("; the router keeps the same input in BF16 anyhow")


def test_products_that_run_again_are_not_kept_in_fp8():
    model = apply_recompute(shapes(DEEP), "selective")
    convert(model, "conservative")  # leaves SwiGLU as it is
    shared = model.layers[2].ffn.shared_experts
    assert not isinstance(shared, InFp8)
    assert shared.w2.recipe.kept == "bf16"


def test_a_policy_of_recomputation_is_refused_after_a_conversion():
    model = shapes()
    convert(model)
    message = "layers.0.attn.wq_a is a Fp8Linear. Call apply_recompute first."
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_recompute(model, "selective")


def test_a_conversion_reads_as_a_table():
    text = repr(convert(shapes(DEEP), filter=["layers.3.attn.wo", "mtp"]))
    title, header, *lines = text.splitlines()
    assert title.startswith("Conversion(deepseek-v3 on cpu: 52 of 123 operators in FP8")
    assert header.split() == ["module", "n", "from", "to", "kept", "backend", "reason"]
    by_name = {line.split()[0]: line.split()[1:6] for line in lines}
    assert by_name["layers.*.attn.wo"] == ["5", "high", "fp8", "e5m6", "emulate"]
    assert by_name["layers.3.attn.wo"] == ["1", "high", "high", "-", "-"]
    assert by_name["layers.*.ffn.gate"] == ["5", "high", "high", "-", "-"]
    # What all have in common is said once.
    assert text.count("a CPU has no FP8 units") == 1
    starts = {line.index("sensitive:") for line in lines if "sensitive:" in line}
    assert starts == {header.index("reason")}
