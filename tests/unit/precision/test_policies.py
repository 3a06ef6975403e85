"""What policies choose, and that a word nobody knows is refused."""

import re

import pytest

from labkit.config import PRESETS
from labkit.precision.operators import CLASSES, PARTS, Operator, operators
from labkit.precision.policies import (
    POLICIES,
    Choice,
    PrecisionPolicy,
    Rule,
    policy_of,
)

V3 = PRESETS["v3-671b"]
OPERATORS = operators(V3)
FP8 = Choice(compute="fp8", reason="for the test")
BF16 = Choice(compute="bf16", reason="for the test")


def chosen(policy: str | PrecisionPolicy) -> dict[str, Choice]:
    policy = policy_of(policy)
    return {op.name: policy.choose(op, V3.n_layers) for op in OPERATORS}


def parts_in_fp8(policy: str) -> set[str]:
    choices = chosen(policy)
    return {op.part for op in OPERATORS if choices[op.name].compute == "fp8"}


def operator(name: str) -> Operator:
    return next(op for op in OPERATORS if op.name == name)


LINEARS = {"wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3"}


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("bf16", set()),
        ("conservative", LINEARS - {"wo"}),
        ("deepseek-v3", LINEARS | {"experts", "dispatch"}),
        (
            "aggressive",
            LINEARS | {"experts", "dispatch", "combine", "eh_proj", "head"},
        ),
        ("article-1", {"w1", "w2", "w3", "eh_proj"}),
        ("article-a100", LINEARS | {"eh_proj"}),
    ],
)
def test_parts_in_fp8_are_those_of_each_policy(policy, parts):
    assert parts_in_fp8(policy) == parts


def test_deepseek_keeps_high_what_its_report_lists():
    choices = chosen("deepseek-v3")
    for word in ("embed", "head", "gate", "core", "attn_norm", "kv_norm", "norm"):
        of_word = [choices[op.name] for op in OPERATORS if op.part == word]
        assert {choice.compute for choice in of_word} == {"bf16"}, word
        assert {choice.input_format for choice in of_word} == {"bf16"}, word


def test_deepseek_keeps_inputs_in_three_formats():
    choices = chosen("deepseek-v3")
    assert choices["layers.9.attn.wo"].input_format == "e5m6"
    assert choices["layers.9.attn.wq_a"].input_format == "e4m3"
    assert choices["layers.9.ffn.experts.swiglu"].input_format == "e4m3"
    assert choices["layers.9.ffn.experts.swiglu"].compute == "bf16"
    assert choices["layers.9.ffn.dispatch"].input_format == "e4m3"
    assert choices["layers.9.ffn.combine"].input_format == "bf16"


def test_the_sketch_does_not_use_the_depth():
    choices = chosen("article-1")
    for op in OPERATORS:
        if op.depth is not None and op.name.startswith("layers.") and op.depth > 3:
            same = choices[op.name.replace(f".{op.depth}.", ".3.")]
            assert choices[op.name] == same


def test_first_four_attention_layers_are_bf16_for_one_a100():
    choices = chosen("article-a100")
    computed = [choices[f"layers.{i}.attn.wo"].compute for i in range(V3.n_layers)]
    assert computed == ["bf16"] * 4 + ["fp8"] * 57
    assert choices["layers.0.ffn.w1"].compute == "fp8"
    assert choices["head"].compute == "bf16"


def test_both_ends_are_bf16_to_the_conservative():
    choices = chosen("conservative")
    computed = [choices[f"layers.{i}.attn.wq_a"].compute for i in range(V3.n_layers)]
    assert computed == ["bf16"] * 2 + ["fp8"] * 57 + ["bf16"] * 2
    assert choices["mtp.0.block.attn.wq_a"].compute == "bf16"


def test_policies_grow_bolder_one_by_one():
    width = {"e4m3": 8, "e5m6": 12, "bf16": 16}
    names = list(POLICIES)[:4]
    assert names == ["bf16", "conservative", "deepseek-v3", "aggressive"]
    for former, latter in zip(names, names[1:], strict=False):
        assert parts_in_fp8(former) < parts_in_fp8(latter)
        before, after = chosen(former), chosen(latter)
        for name in before:
            assert (before[name].compute, after[name].compute) != ("fp8", "bf16")
            bits = [width[choices[name].input_format] for choices in (before, after)]
            assert bits[0] >= bits[1]


@pytest.mark.parametrize("name", POLICIES)
def test_every_choice_has_a_reason(name):
    assert all(choice.reason for choice in chosen(name).values())
    assert POLICIES[name].name == name


def test_the_first_rule_that_matches_holds():
    policy = PrecisionPolicy(
        name="mine",
        critical=BF16,
        dense=FP8,
        sparse=FP8,
        rules=(
            Rule(words=("wq_a",), choice=FP8),
            Rule(words=("attn",), choice=BF16, layers="last", n_layers=1),
        ),
    )
    choices = chosen(policy)
    assert choices["layers.60.attn.wq_a"] is FP8
    assert choices["layers.60.attn.wkv_a"] is BF16
    assert choices["layers.59.attn.wkv_a"] is FP8
    assert choices["layers.0.attn.wkv_a"] is FP8
    # MTP is no main layer.
    assert choices["mtp.0.block.attn.wkv_a"] is FP8


def test_a_word_is_a_whole_word():
    rule = Rule(words=("experts",), choice=FP8)
    assert rule.matches(operator("layers.9.ffn.experts"), V3.n_layers)
    assert not rule.matches(operator("layers.9.ffn.shared_experts.w1"), V3.n_layers)


@pytest.mark.parametrize("word", ["lm_head", "output", "layers.0", ""])
def test_a_word_that_no_operator_has_is_refused(word):
    message = (
        f"words must be among {', '.join(PARTS)}; got ('wo', {word!r}). A rule that "
        "matches nothing would leave an operator as its class is."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Rule(words=("wo", word), choice=FP8)


def test_a_rule_without_words_is_refused():
    with pytest.raises(ValueError, match="^words must be among"):
        Rule(words=(), choice=FP8)


def test_a_rule_for_some_layers_says_how_many():
    message = "n_layers must be a whole number of at least 1; got 0."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Rule(words=("wo",), choice=FP8, layers="first")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Choice(compute="int8", reason=""),
            "compute must be one of 'fp8', 'bf16'; got 'int8'.",
        ),
        (
            lambda: Choice(compute="fp8", kept="fp4", reason=""),
            "kept must be one of 'e4m3', 'e5m6', 'bf16'; got 'fp4'.",
        ),
        (
            lambda: policy_of("bold"),
            "policy must be one of 'bf16', 'conservative', 'deepseek-v3', ",
        ),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make()


def test_classes_are_fields_of_a_policy():
    assert set(CLASSES) <= set(PrecisionPolicy.__dataclass_fields__)
