"""What a tape keeps in FP8, by hand."""

from collections import Counter

import pytest
import torch

from labkit.config import PRESETS, ModelConfig
from labkit.memory.activations import block_tape
from labkit.memory.formats import formats_of
from labkit.memory.tape import Op, Pass

V3 = PRESETS["v3-671b"]
N = 1024
BF16 = torch.bfloat16

TILED = 1 + 4 / 128
"""Bytes of a value in E4M3, FP32 scales included."""


def kept(ops: list[Op]) -> Counter[tuple[str, str]]:
    return Counter(
        {(op.module, each.what): each.n_bytes for op in ops for each in op.kept}
    )


def layer(cached: str | dict[str, str], *, number: int, ep: int = 1) -> list[Op]:
    """Return the tape of a layer of DeepSeek-V3, of which the first three are dense."""
    step = Pass(
        batch=1,
        seq_len=N,
        weights=BF16,
        compute=BF16,
        device="gpu",
        n_rows=8 * N,
        ep=ep,
        formats=formats_of(V3, cached),
    )
    is_dense, inner = number < 3, step.within(f"layers.{number}")
    return list(block_tape(V3, inner, is_dense=is_dense, stream=BF16))


def test_a_dense_layer_keeps_a_byte_for_what_its_linears_read():
    before, after = (kept(layer(x, number=0)) for x in ("compute", "fp8"))
    narrow = {name for name in after if after[name] != before[name]}

    assert before.keys() - after.keys() == {("ffn", "silu"), ("ffn.w2", "input")}
    assert narrow == {
        ("attn.wq_a", "input"),
        ("attn.wq_b", "input"),
        ("attn.wkv_b", "input"),
        ("attn.wo", "input"),
        ("ffn.w1", "input"),
        ("ffn", "gate"),
        ("ffn", "up"),
    }
    assert after["ffn", "gate"] == N * 18_432 * TILED
    assert after["attn.wo", "input"] == N * 128 * 128 * (1.5 + 4 / 128)


def test_experts_keep_a_byte_for_rows_that_arrive_and_for_what_swiglu_reads():
    after = kept(layer("fp8", number=9, ep=8))

    assert after["ffn.experts", "received rows"] == 8 * N * 7168 * TILED
    assert after["ffn.experts", "gates and ups"] == 8 * N * 4096 * TILED


def test_routers_and_norms_stay_as_they_are():
    before, after = (kept(layer(x, number=9)) for x in ("compute", "fp8"))

    for module in ("ffn.gate", "attn_norm", "ffn_norm", "attn.kv_norm", "attn"):
        for name in before:
            if name[0] == module:
                assert after[name] == before[name]


def test_experts_keep_nothing_of_their_own_of_what_the_router_keeps():
    after = kept(layer("fp8", number=9))
    readers = {module for module, what in after if what == "input"}

    assert readers.isdisjoint({"ffn.experts", "ffn.shared_experts.w1"})
    assert after["ffn.gate", "input"] == 2 * N * 7168


def test_readers_of_one_tensor_keep_it_once_in_each_of_their_formats():
    cached = {f"layers.0.attn.{name}": "e4m3" for name in ("wq_a", "wkv_a")}
    alike = kept(layer(cached, number=0))
    mixed = kept(layer({"layers.0.attn.wkv_a": "e4m3"}, number=0))
    scaled = N * 7168 * (1 + 1 / 128)  # scales are powers of two, a byte each

    assert alike["attn.wq_a", "input"] == scaled
    assert ("attn.wkv_a", "input") not in alike
    assert mixed["attn.wq_a", "input"] == 2 * N * 7168
    assert mixed["attn.wkv_a", "input"] == scaled


def test_layers_of_other_blocks_stay_as_they_are():
    plain = layer("compute", number=1)

    assert layer({"layers.0.attn.wo": "e5m6"}, number=1) == plain
    assert layer({"layers.1.attn.wo": "e5m6"}, number=1) != plain


def test_products_in_fp8_need_copies_while_their_backward_runs():
    before, after = (
        {op.module: op.working_bytes for op in layer(x, number=0)}
        for x in ("compute", "fp8")
    )
    hidden, dim = N * 18_432, N * 7168
    product = 2 * hidden  # computed again, in BF16
    copies = (hidden + 2 * dim) * 33 // 32

    assert after["ffn.w2"] - before["ffn.w2"] == product + copies
    assert after["attn_norm"] == before["attn_norm"]


def test_what_computes_in_fp32_has_nothing_to_narrow():
    with pytest.raises(ValueError) as error:
        Pass(batch=1, seq_len=8, formats=formats_of(V3, "fp8"))

    assert str(error.value) == (
        "layers in FP8 narrow what a BF16 model keeps; got products in torch.float32. "
        "Set precision='bf16', or cached='compute'."
    )


@pytest.mark.parametrize(
    ("cached", "message"),
    [
        (
            {"layers.0.attn.wo": "fp8"},
            "cached['layers.0.attn.wo'] must be one of 'e4m3', 'e5m6', 'bf16'; got "
            "'fp8'. Set cached['layers.0.attn.wo']='e4m3' or another of these.",
        ),
        (
            {"layers.0.attn.w0": "e4m3"},
            "cached must name layers of the model that can be in FP8, such as 'head'; "
            "got 'layers.0.attn.w0'. Make it for this model.",
        ),
    ],
)
def test_formats_of_nothing_are_refused(cached, message, dense: ModelConfig):
    with pytest.raises(ValueError) as error:
        formats_of(dense, cached)

    assert str(error.value) == message
