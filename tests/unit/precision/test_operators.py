"""Operators against a sheet of paper, the model's own modules, and published counts."""

from collections import Counter
from dataclasses import replace

import pytest
from torch import nn

from labkit.config import (
    PRESETS,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
)
from labkit.model import Transformer
from labkit.precision.operators import CLASSES, PARTS, Operator, operators

PAPER = ModelConfig(
    vocab_size=10,
    dim=8,
    n_layers=2,
    inter_dim=16,
    attention=MLAConfig(
        n_heads=2,
        q_lora_rank=4,
        kv_lora_rank=6,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=3,
    ),
    moe=MoEConfig(n_routed_experts=4, n_activated_experts=2, moe_inter_dim=5),
    mtp=MTPConfig(),
)

# Parameters, and FLOPs of a token in a sequence of 10.
ATTENTION = {
    "attn_norm": (8, 16),
    "attn.wq_a": (4 * 8, 64),
    "attn.q_norm": (4, 8),
    "attn.wq_b": (2 * (4 + 2) * 4, 96),
    "attn.wkv_a": ((6 + 2) * 8, 128),
    "attn.kv_norm": (6, 12),
    "attn.wkv_b": (2 * (4 + 3) * 6, 168),
    # Two heads see 5 tokens: 2 * 6 FLOPs for a score, 2 * 3 for its value.
    "attn.core": (0, 2 * 5 * (2 * 6 + 2 * 3)),
    "attn.wo": (8 * 2 * 3, 96),
    "ffn_norm": (8, 16),
}

DENSE = {
    "ffn.w1": (16 * 8, 256),
    "ffn.w3": (16 * 8, 256),
    "ffn.swiglu": (0, 0),
    "ffn.w2": (8 * 16, 256),
}

SPARSE = {
    "ffn.gate": (4 * 8 + 4, 72),
    "ffn.dispatch": (0, 0),
    # Two of four experts.
    "ffn.experts": (4 * 3 * 8 * 5, 2 * 2 * 3 * 8 * 5),
    "ffn.experts.swiglu": (0, 0),
    "ffn.combine": (0, 0),
    "ffn.shared_experts.w1": (5 * 8, 80),
    "ffn.shared_experts.w3": (5 * 8, 80),
    "ffn.shared_experts.swiglu": (0, 0),
    "ffn.shared_experts.w2": (8 * 5, 80),
}


def within(name: str, inner: dict) -> dict:
    return {f"{name}.{each}": counts for each, counts in inner.items()}


BY_HAND = {
    "embed": (10 * 8, 0),
    **within("layers.0", ATTENTION | DENSE),
    **within("layers.1", ATTENTION | SPARSE),
    "norm": (8, 16),
    "head": (10 * 8, 160),
    "mtp.0.enorm": (8, 16),
    "mtp.0.hnorm": (8, 16),
    "mtp.0.eh_proj": (16 * 8, 256),
    **within("mtp.0.block", ATTENTION | SPARSE),
    "mtp.0.norm": (8, 16),
    "mtp.0.head": (0, 160),  # the model's own, used again
}

TINY = PRESETS["tiny"]

VARIANTS = {
    "paper": PAPER,
    "tiny": TINY,
    "queries without a rank": replace(
        TINY, attention=replace(TINY.attention, q_lora_rank=None)
    ),
    "grouped queries": replace(
        TINY, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=32)
    ),
    "dense": replace(TINY, moe=None),
    "no bias": replace(TINY, moe=replace(TINY.moe, has_bias=False)),
    "no shared expert": replace(TINY, moe=replace(TINY.moe, n_shared_experts=0)),
    "two shared experts": replace(TINY, moe=replace(TINY.moe, n_shared_experts=2)),
    "no mtp": replace(TINY, mtp=None),
    "two mtp": replace(TINY, mtp=MTPConfig(depth=2)),
    "experts everywhere": replace(TINY, n_dense_layers=0),
}

EVERY = VARIANTS | dict(PRESETS)


def main_of(ops: tuple[Operator, ...]) -> list[Operator]:
    return [op for op in ops if not op.name.startswith("mtp")]


def test_parameters_and_flops_are_those_of_a_sheet_of_paper():
    got = {
        op.name: (op.n_params, op.flops_per_token)
        for op in operators(PAPER, seq_len=10)
    }
    assert got == BY_HAND
    assert list(got) == list(BY_HAND)


@pytest.mark.parametrize("name", EVERY)
def test_every_operator_appears_once(name):
    counted = Counter(op.name for op in operators(EVERY[name]))
    assert set(counted.values()) == {1}


@pytest.mark.parametrize("name", EVERY)
def test_parameters_sum_to_those_of_the_model(name):
    cfg = EVERY[name]
    ops = operators(cfg)
    assert sum(op.n_params for op in main_of(ops)) == cfg.n_params()
    assert sum(op.n_params for op in ops) == cfg.n_params(include_mtp=True)


@pytest.mark.parametrize("name", EVERY)
def test_flops_sum_to_those_of_the_model(name):
    flops = sum(op.flops_per_token for op in main_of(operators(EVERY[name], seq_len=6)))
    assert flops == EVERY[name].flops_per_token(6, training=False)


@pytest.mark.parametrize("name", VARIANTS)
def test_operators_with_weights_are_the_modules_that_hold_them(name):
    def own_values(module: nn.Module) -> int:
        held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        return sum(tensor.numel() for tensor in held)

    model = Transformer(VARIANTS[name], device="meta")
    modules = {name: own_values(m) for name, m in model.named_modules() if name}
    held = {name: n for name, n in modules.items() if n}
    ops = {op.name: op.n_params for op in operators(VARIANTS[name]) if op.n_params}
    assert ops == held


def test_mtp_takes_ten_gigaflops_of_a_token_more():
    ops = operators(PRESETS["v3-671b"])
    flops = sum(op.flops_per_token for op in ops if op.name.startswith("mtp"))
    assert 3 * flops / 1e9 == pytest.approx(10.2, abs=0.05)


def test_linear_layers_take_seven_eighths_of_a_layer_of_experts():
    flops: Counter[str] = Counter()
    for op in operators(PRESETS["v3-671b"]):
        if op.depth == 9:
            flops[op.kind] += op.flops_per_token
    assert flops["core"] / flops.total() == pytest.approx(0.125, abs=5e-4)
    linear = flops["product"] + flops["router"]
    assert linear / flops.total() == pytest.approx(0.875, abs=5e-4)


def test_layers_count_on_into_mtp():
    depths = [op.depth for op in operators(PAPER)]
    assert [n for n in dict.fromkeys(depths) if n is not None] == [0, 1, 2]
    outside = {op.name for op in operators(PAPER) if op.depth is None}
    assert outside == {"embed", "norm", "head"}


def test_classes_are_those_of_the_plans_that_sort_layers():
    by_class = {name: set() for name in CLASSES}
    for op in operators(PAPER):
        by_class[op.precision_class].add(op.part)
    assert by_class["sparse"] == {"experts", "dispatch", "combine"}
    linears = {"wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3", "eh_proj"}
    assert by_class["dense"] == linears
    assert by_class["critical"] >= {"core", "gate", "norm", "embed", "head", "q_norm"}


def test_rows_are_sent_for_each_expert_of_a_token():
    sent = {op.part: op for op in operators(PAPER) if op.kind == "send"}
    assert set(sent) == {"dispatch", "combine"}
    assert {(op.n_rows_sent, op.row_width) for op in sent.values()} == {(2, 8)}


def test_parts_are_the_words_that_names_are_made_of():
    words = {w for cfg in EVERY.values() for op in operators(cfg) for w in op.words}
    assert {word for word in words if not word.isdigit()} == set(PARTS)


def test_a_sequence_is_no_longer_than_the_model_takes():
    def core_flops(cfg: ModelConfig, **lengths: int) -> int:
        ops = {op.name: op for op in operators(cfg, **lengths)}
        return ops["layers.0.attn.core"].flops_per_token

    assert core_flops(TINY) == core_flops(TINY, seq_len=256)
    v3 = PRESETS["v3-671b"]
    assert core_flops(v3) == core_flops(v3, seq_len=4096)


def test_a_sequence_without_tokens_is_refused():
    with pytest.raises(ValueError, match="^seq_len must be a whole number of at least"):
        operators(PAPER, seq_len=0)
