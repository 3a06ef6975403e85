"""What a tape keeps in FP8, by hand."""

from collections import Counter

import pytest
import torch

from labkit.config import PRESETS
from labkit.memory.activations import block_tape
from labkit.memory.fp8_tape import fp8_tape
from labkit.memory.tape import Op, Pass, fp8_bytes

V3 = PRESETS["v3-671b"]
N = 1024


def kept(ops: list[Op]) -> Counter[tuple[str, str]]:
    return Counter(
        {(op.module, each.what): each.n_bytes for op in ops for each in op.kept}
    )


def layer(*, is_dense: bool, ep: int = 1, cached: str = "compute") -> list[Op]:
    bf16 = torch.bfloat16
    step = Pass(
        batch=1,
        seq_len=N,
        weights=bf16,
        compute=bf16,
        device="gpu",
        n_rows=8 * N,
        ep=ep,
        cached=cached,
    )
    return list(block_tape(V3, step, is_dense=is_dense, stream=bf16))


def test_a_tensor_shrinks_by_48_percent():
    assert round(1 - fp8_bytes(2 * 2**20) / (2 * 2**20), 3) == 0.484


def test_a_dense_layer_keeps_a_byte_for_what_its_linears_read():
    before = kept(layer(is_dense=True))
    after = kept(list(fp8_tape(layer(is_dense=True))))
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
    assert after["ffn", "gate"] == N * 18_432 * (1 + 4 / 128)
    assert after["attn.wo", "input"] == N * 128 * 128 * (1.5 + 4 / 128)


def test_experts_keep_a_byte_for_rows_that_arrive_and_for_what_swiglu_reads():
    after = kept(list(fp8_tape(layer(is_dense=False, ep=8))))

    assert after["ffn.experts", "received rows"] == 8 * N * 7168 * (1 + 4 / 128)
    assert after["ffn.experts", "gates and ups"] == 8 * N * 4096 * (1 + 4 / 128)


def test_routers_and_norms_stay_as_they_are():
    before = kept(layer(is_dense=False))
    after = kept(list(fp8_tape(layer(is_dense=False))))

    for module in ("ffn.gate", "attn_norm", "ffn_norm", "attn.kv_norm", "attn"):
        for name in before:
            if name[0] == module:
                assert after[name] == before[name]


@pytest.mark.parametrize("is_dense", [True, False])
def test_a_pass_that_caches_in_fp8_keeps_the_same(is_dense):
    narrowed = kept(list(fp8_tape(layer(is_dense=is_dense, ep=8))))

    assert kept(layer(is_dense=is_dense, ep=8, cached="fp8")) == narrowed


def test_products_in_fp8_need_copies_while_their_backward_runs():
    before, after = (
        {op.module: op.working_bytes for op in layer(is_dense=True, cached=cached)}
        for cached in ("compute", "fp8")
    )
    hidden, dim = N * 18_432, N * 7168
    product = 2 * hidden  # computed again, in BF16
    copies = (hidden + 2 * dim) * 33 // 32

    assert after["ffn.w2"] - before["ffn.w2"] == product + copies
    assert after["attn_norm"] == before["attn_norm"]


def test_what_computes_in_fp32_has_nothing_to_narrow():
    with pytest.raises(ValueError) as error:
        Pass(batch=1, seq_len=8, cached="fp8")

    assert str(error.value) == (
        "cached='fp8' narrows what a BF16 model keeps; got products in torch.float32. "
        "Set precision='bf16', or cached='compute'."
    )
