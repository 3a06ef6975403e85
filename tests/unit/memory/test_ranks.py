"""One rank's part of a tape, by hand."""

from collections import Counter

import pytest
import torch

from labkit.config import PRESETS, Layout
from labkit.memory.activations import block_tape
from labkit.memory.playback import kept_by_part
from labkit.memory.ranks import rank_tape, rows_to_plan
from labkit.memory.tape import Op, Pass

V3 = PRESETS["v3-671b"]
BF16 = torch.bfloat16
LAYOUT = Layout(pp=16, dp=32, tp=2, ep=8)


def layer(layout: Layout, **more: float) -> list[Op]:
    step = Pass(
        batch=1,
        seq_len=4096,
        weights=BF16,
        compute=BF16,
        device="gpu",
        n_rows=rows_to_plan(V3.moe, 4096, layout, **more),
        ep=layout.ep,
    )
    return list(block_tape(V3, step, is_dense=False, stream=BF16))


def kept(ops: list[Op]) -> Counter[tuple[str, str]]:
    return Counter(
        {(op.module, each.what): each.n_bytes for op in ops for each in op.kept}
    )


def test_a_single_rank_runs_the_whole_tape():
    ops = layer(Layout())

    assert list(rank_tape(ops, Layout())) == ops


def test_tensor_parallel_ranks_share_all_but_latents():
    layout = Layout(tp=2)
    ops = layer(layout)
    whole, part = kept(ops), kept(list(rank_tape(ops, layout)))
    undivided = {name for name, n_bytes in part.items() if n_bytes == whole[name]}
    halved = {name for name, n_bytes in part.items() if 2 * n_bytes == whole[name]}

    assert undivided | halved == whole.keys()
    assert undivided == {
        ("attn.q_norm", "input"),
        ("attn.wq_b", "input"),
        ("attn.kv_norm", "input"),
        ("attn.wkv_b", "input"),
        ("attn", "random state"),
    }


@pytest.mark.parametrize(("imbalance", "n_rows"), [(1.0, 16_384), (1.25, 20_480)])
def test_experts_keep_the_rows_that_arrive(imbalance, n_rows):
    ops = list(rank_tape(layer(LAYOUT, imbalance=imbalance), LAYOUT))
    experts = kept(ops)

    assert experts["ffn.experts", "gates and ups"] == n_rows * 2 * 2048 * 2
    assert experts["ffn.experts", "received rows"] == n_rows * 7168 * 2
    assert kept_by_part(ops)["dispatch"] == n_rows * 7168 * 2


def test_ranks_make_gradients_of_the_weights_they_hold():
    ops = list(rank_tape(layer(LAYOUT), LAYOUT))
    gradients = Counter()
    for op in ops:
        gradients[op.module] += op.gradient_bytes

    assert gradients["ffn.experts"] == 2 * 32 * 3 * 7168 * 2048
    assert gradients["attn.wo"] == 2 * 128 * 128 * 7168 // 2
    assert gradients["attn.wq_a"] == 2 * 7168 * 1536


def test_the_router_keeps_what_experts_read_and_those_sent_elsewhere_no_more():
    for layout in (Layout(), LAYOUT):
        readers = {module for module, what in kept(layer(layout)) if what == "input"}
        ops = kept(layer(layout))

        assert ops["ffn.gate", "input"] == 4096 * 7168 * 2
        assert readers.isdisjoint({"ffn.experts", "ffn.shared_experts.w1"})
