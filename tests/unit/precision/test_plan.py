"""Plans: published bytes and shares, and what a device makes of a policy."""

import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import PRESETS
from labkit.hardware import ACCELERATORS
from labkit.precision.operators import Matrices, operators
from labkit.precision.plan import PrecisionPlan, plan, speed_up, stored_bytes
from labkit.precision.policies import POLICIES, Choice, PrecisionPolicy, Rule
from labkit.precision.quantize import QuantSpec

TINY, V3 = PRESETS["tiny"], PRESETS["v3-671b"]

DEVICES = ("cpu", *ACCELERATORS)


@cache
def of_v3(policy: str = "deepseek-v3", device: str = "h800") -> PrecisionPlan:
    return plan(V3, policy, device)


def test_weights_take_the_bytes_of_the_published_checkpoint():
    by_format = of_v3().weight_bytes
    # The checkpoint repeats embedding and head for MTP, in BF16.
    repeated = 2 * 2 * V3.vocab_size * V3.dim
    published = 688.57e9
    assert sum(by_format.values()) + repeated == pytest.approx(published, rel=1e-5)
    # 684,531,386,000 entries are published: values, and scales in FP32.
    n_values = by_format["e4m3"] + by_format["bf16"] // 2 + by_format["fp32"] // 4
    assert n_values + by_format["scale"] // 4 + repeated // 2 == 684_531_386_000


def test_weights_of_a_bf16_run_take_two_bytes_each():
    by_format = of_v3("bf16").weight_bytes
    n_biases = 59 * 256
    assert by_format == {
        "bf16": 2 * (V3.n_params(include_mtp=True) - n_biases),
        "fp32": 4 * n_biases,
    }


@pytest.mark.parametrize(
    ("policy", "parts", "share"),
    [
        # 7,168 bytes and 56 scales of 4, by 14,336.
        ("deepseek-v3", ("dispatch",), (7168 + 56 * 4) / 14336),
        ("deepseek-v3", ("combine",), 1),
        ("deepseek-v3", (), (7168 + 56 * 4 + 14336) / 28672),
        ("aggressive", ("dispatch",), (7168 + 56) / 14336),
        ("article-1", (), 1),
    ],
)
def test_what_is_sent_by_what_bf16_sends(policy, parts, share):
    assert of_v3(policy).sent_share(*parts) == pytest.approx(share)


def test_deepseek_sends_the_published_shares():
    assert of_v3().sent_share("dispatch") == pytest.approx(0.516, abs=5e-4)
    assert of_v3().sent_share() == pytest.approx(0.758, abs=5e-4)


def test_a_token_sends_a_row_to_each_of_its_experts():
    # 58 main layers and MTP's.
    assert of_v3().sent_bytes("dispatch") == 59 * 8 * (7168 + 56 * 4)
    assert of_v3().sent_bytes("combine") == 59 * 8 * 2 * 7168
    assert of_v3().sent_bytes() == of_v3().sent_bytes("combine", "dispatch")


def test_a_dense_model_sends_nothing():
    dense = plan(replace(TINY, moe=None))
    assert dense.sent_bytes() == 0
    assert dense.sent_share() == 1
    # Rules about experts have nothing to hold for.
    assert {rule.words for rule in dense.unused_rules} == {("dispatch",), ("combine",)}
    assert plan(TINY).unused_rules == ()


def test_fp8_takes_the_share_of_linear_layers():
    shares = of_v3().flop_shares
    high = [op for op in operators(V3) if op.part in ("core", "head", "gate")]
    high += [op for op in operators(V3) if op.kind == "norm" or op.part == "eh_proj"]
    total = sum(op.flops_per_token for op in operators(V3))
    expected = 1 - sum(op.flops_per_token for op in high) / total
    assert of_v3().fp8_flop_share == shares["fp8"] == pytest.approx(expected)
    assert sum(shares.values()) == pytest.approx(1)
    # The articles' sketch leaves nine tenths in BF16.
    assert of_v3("article-1").fp8_flop_share == pytest.approx(0.09, abs=5e-3)


@pytest.mark.parametrize(
    ("share", "factor", "gain"),
    [
        *((0.6, 1.4, 0.21), (0.7, 1.6, 0.36), (0.8, 1.6, 0.43), (0.5, 1.4, 0.17)),
        # All of the linear layers' share at twice the speed.
        (0.875, 2.0, 0.78),
        *((0.0, 2.0, 0.0), (1.0, 2.0, 1.0)),
    ],
)
def test_throughput_grows_by_the_share_that_is_faster(share, factor, gain):
    assert speed_up(share, factor) == pytest.approx(gain, abs=5e-3)


@given(st.floats(0, 1), st.floats(1, 10))
def test_throughput_never_grows_beyond_the_factor(share, factor):
    assert -1e-12 <= speed_up(share, factor) <= factor - 1 + 1e-9


def test_a_plan_is_as_fast_as_its_share_says():
    assert of_v3().speed_up(1.6) == speed_up(of_v3().fp8_flop_share, 1.6)
    assert of_v3(device="a100-80g").speed_up(1.6) == 0
    assert of_v3(device="cpu").speed_up(1.6) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_operator_has_one_row_with_a_reason(policy, device):
    rows = plan(TINY, policy, device).rows
    assert [row.operator for row in rows] == list(operators(TINY))
    for row in rows:
        assert row.reason
        assert (row.compute is None) == (row.operator.kind in ("lookup", "send"))
        assert (row.weight is None) == (
            not row.operator.matrices and not row.operator.n_vector_params
        )


@pytest.mark.parametrize("device", DEVICES)
def test_a_bf16_plan_is_changed_by_no_device_with_bf16(device):
    assert any(row.is_changed for row in plan(TINY, "bf16", device).rows) == (
        device == "v100"
    )


def test_an_a100_only_keeps_fp8():
    on_a100, on_h800 = of_v3(device="a100-80g"), of_v3()
    assert on_a100.flop_shares == {"bf16": pytest.approx(1)}
    assert on_a100.weight_bytes == on_h800.weight_bytes
    row = on_a100.row("layers.9.ffn.experts")
    assert (row.compute, row.weight, row.kept) == ("bf16", "e4m3", "e4m3")
    assert row.is_changed
    assert row.reason == (
        "experts are linear layers too; no FP8 units: FP8 is kept and sent, never "
        "multiplied"
    )
    for ours, theirs in zip(on_a100.rows, on_h800.rows, strict=True):
        assert (ours.weight, ours.kept) == (theirs.weight, theirs.kept)


def test_a_cpu_emulates():
    row = of_v3(device="cpu").row("layers.9.ffn.experts")
    assert (row.compute, row.weight, row.kept) == ("emulated", "e4m3", "e4m3")
    assert row.is_changed
    assert "multiplied as BF16" in row.reason


def test_a_v100_computes_in_fp32_for_want_of_bf16():
    on_v100 = of_v3(device="v100")
    assert on_v100.flop_shares == {"fp32": pytest.approx(1)}
    assert on_v100.row("layers.9.attn.core").reason.endswith(
        "no BF16 units: FP32, as FP16 would need its loss scaled, which labkit does not"
    )
    row = on_v100.row("layers.9.attn.wo")
    assert (row.compute, row.weight, row.kept) == ("fp32", "e4m3", "e5m6")


def test_a_b200_takes_blocks_of_32():
    on_b200 = of_v3(device="b200")
    row = on_b200.row("layers.9.attn.wkv_a")
    assert (row.compute, row.is_changed) == ("fp8", False)
    assert "blocks of 1x32" in row.reason
    assert "padded" not in row.reason  # 576 is a multiple of 32
    # A byte for each block, of a row as of a weight.
    assert on_b200.sent_bytes("dispatch") == 59 * 8 * (7168 + 7168 // 32)
    values, scales = (on_b200.weight_bytes[name] for name in ("e4m3", "scale"))
    assert scales * 32 == values


def test_a_card_without_tiles_scales_rows():
    row = of_v3(device="l4").row("layers.9.attn.wo")
    assert row.compute == "fp8"
    assert "a scale for each row" in row.reason


def test_hopper_pads_what_is_no_multiple_of_a_tile():
    row = of_v3().row("layers.9.attn.wkv_a")
    assert row.compute == "fp8"
    assert row.reason.endswith("; 576 is padded to 640")
    assert "padded" not in of_v3().row("layers.9.attn.wq_a").reason


def test_what_is_narrower_than_a_tile_stays_bf16_where_tiles_are_multiplied():
    row = plan(TINY, hardware="h800").row("layers.0.attn.wq_a")
    assert (row.compute, row.weight, row.kept) == ("bf16", "bf16", "bf16")
    assert row.is_changed
    assert row.reason.endswith("; a side of 48 is less than the 128 of its FP8 units")
    # 128 is as wide as a tile.
    assert plan(TINY, hardware="h800").row("layers.0.ffn.w1").compute == "fp8"
    assert plan(TINY, hardware="cpu").row("layers.0.attn.wq_a").compute == "emulated"


@pytest.mark.parametrize(("device", "width"), [("l4", 16), ("b200", 32)])
def test_each_kind_of_units_has_its_least_width(device, width):
    attention = replace(TINY.attention, q_lora_rank=8)
    row = plan(replace(TINY, attention=attention), hardware=device).row(
        "layers.0.attn.wq_a"
    )
    assert row.compute == "bf16"
    assert row.reason.endswith(
        f"; a side of 8 is less than the {width} of its FP8 units"
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layers.1.ffn.gate", "router"),
        ("layers.1.attn_norm", "norm"),
        ("embed", "lookup"),
        ("layers.1.attn.core", "core"),
        ("layers.1.ffn.experts.swiglu", "pointwise"),
    ],
)
def test_what_is_no_product_with_weights_is_never_fp8(name, kind):
    fp8 = Choice(compute="fp8", reason="everything")
    rash = PrecisionPolicy(name="rash", critical=fp8, dense=fp8, sparse=fp8)
    row = plan(TINY, rash, "h800").row(name)
    assert row.operator.kind == kind
    assert row.compute in ("bf16", None)
    assert row.weight in ("bf16", None)
    assert row.kept in ("bf16", None)
    assert row.is_changed
    assert row.reason.startswith("everything; never FP8: ")


def test_a_policy_of_ones_own_is_planned_as_it_is():
    bf16 = Choice(compute="bf16", reason="mine")
    mine = PrecisionPolicy(
        name="mine",
        critical=bf16,
        dense=bf16,
        sparse=bf16,
        rules=(
            Rule(words=("w2",), choice=Choice(compute="fp8", reason="w2")),
            Rule(words=("wk",), choice=bf16),
        ),
    )
    planned = plan(V3, mine, "h100")
    fp8 = {row.operator.part for row in planned.rows if row.compute == "fp8"}
    assert fp8 == {"w2"}
    # V3 has no `wk`: what the rule did not do can be read.
    assert planned.unused_rules == (mine.rules[1],)


def test_rows_that_differ_in_their_layer_alone_are_one_group():
    groups = {group.name: group for group in of_v3("article-a100").groups()}
    # 3 outside of layers, 10 of every layer, 4 of a dense one, 9 of one with experts;
    # MTP's layer again, and 5 of its own.
    assert len(of_v3().groups()) == 3 + 10 + 4 + 9 + (10 + 9 + 5)
    later = groups["layers.*.attn.wo"]  # of two groups the second
    assert (later.layers, later.compute) == ("4-60", "fp8")
    assert groups["layers.*.ffn.w1"].layers == "0-2"
    assert groups["mtp.*.block.attn.wo"].layers == "61"
    assert groups["head"].layers == ""


@pytest.mark.parametrize("policy", POLICIES)
def test_groups_hold_every_row(policy):
    planned = plan(TINY, policy)
    n_rows = 0
    for group in planned.groups():
        ends = [part.split("-") for part in group.layers.split(", ")]
        n_rows += sum(int(e[-1]) - int(e[0]) + 1 if e[0] else 1 for e in ends)
    assert n_rows == len(planned.rows)


@pytest.mark.parametrize(
    ("name", "spec", "expected"),
    [
        ("e4m3", QuantSpec(tile=(128, 128), scale="fp32"), (3 * 130 * 7, 3 * 2 * 4)),
        ("e4m3", QuantSpec(tile=(1, 32)), (3 * 130 * 7, 3 * 130)),
        ("e4m3", QuantSpec(tile="row"), (3 * 130 * 7, 3 * 130)),
        ("e5m6", QuantSpec(tile="tensor"), (3 * 130 * 12, 3)),
        ("bf16", QuantSpec(), (3 * 130 * 7 * 2, 0)),
        ("fp32", QuantSpec(), (3 * 130 * 7 * 4, 0)),
    ],
)
def test_bytes_are_those_of_values_and_of_a_scale_for_each_tile(name, spec, expected):
    assert stored_bytes(Matrices(3, 130, 7), name, spec) == expected


def test_a_plan_reads_as_a_sentence():
    assert repr(of_v3()) == (
        "PrecisionPlan(deepseek-v3 on h800: 1171 operators, 0 not as the policy asked; "
        "FLOPs 16.7% bf16, 83.3% fp8; weights 684.9 GB; FP8 units with 22-bit sums: "
        "tiles of 128, promoted to FP32 at each)"
    )


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: of_v3().row("lm_head"),
            "name must be an operator's, such as 'layers.0.attn_norm'; got 'lm_head'. "
            "Each row's operator has its name.",
        ),
        (
            lambda: of_v3().sent_bytes("gradients"),
            "part must be one of 'dispatch', 'combine'; got 'gradients'. Set "
            "part='dispatch' or another of these.",
        ),
        (
            lambda: of_v3().speed_up(0),
            "factor must be above 0 and finite; got 0. Set factor to a number above 0.",
        ),
        (
            lambda: speed_up(1.5, 2),
            "share must be between 0 and 1; got 1.5. Divide the time of FP8 products "
            "by the time of the step.",
        ),
    ],
)
def test_a_question_without_an_answer_is_refused(ask, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ask()
