"""What every policy keeps, to the byte, and which products it runs again."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from labkit.config import ModelConfig, MTPConfig
from labkit.memory import AllocationCount
from labkit.memory.fakes import faked
from labkit.memory.measure import measure
from labkit.memory.recompute import RECOMPUTE_POLICIES, apply_recompute
from labkit.model import Transformer

BATCH, SEQ = 2, 16
TOKENS = BATCH * SEQ


def build(cfg, policy="none", *, k=4):
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
    return apply_recompute(model, policy, k=k)


def batch():
    source = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (BATCH, SEQ + 1), generator=source)
    return tokens[:, :-1], tokens[:, 1:]


def kept_bytes(model):
    """Return the bytes alive between forward and backward, results included."""
    with AllocationCount() as count:
        loss = model.loss(*batch())
        kept = count.live_bytes
    del loss
    return kept


def flops(model):
    with FlopCounterMode(display=False) as counter:
        model.loss(*batch()).total.backward()
    return counter.get_total_flops()


class Kept(NamedTuple):
    """Values that parts of a layer of MLA keep of each token, counted by hand."""

    normed: int
    """What a norm leaves its readers, and the inverse root mean square it kept."""

    residual: int
    """The residual stream before attention, and before the feed-forward network."""

    selective_attention: int
    """Compressed queries and keys, and what attention gives the output projection."""

    attention: int
    """Without a policy."""

    mlp: int
    """The same of a dense network."""


def by_hand(cfg: ModelConfig) -> Kept:
    mla, normed = cfg.attention, cfg.dim + 1
    result = mla.n_heads * mla.v_head_dim
    parts = (  # in the order in which they are made
        cfg.dim + normed,
        mla.q_lora_rank + mla.q_lora_rank + 1,
        mla.cache_width + mla.kv_lora_rank + 1,
        mla.n_heads * (2 * mla.qk_head_dim + mla.v_head_dim),  # q, k, v of the core
        result,
    )
    return Kept(
        normed=normed,
        residual=2 * cfg.dim,
        selective_attention=mla.q_lora_rank + mla.cache_width + result,
        attention=sum(parts),
        mlp=cfg.dim + normed + 4 * cfg.inter_dim,
    )


@pytest.mark.parametrize("policy", ["none", "full", "selective", "attention"])
def test_a_further_dense_layer_keeps_what_its_policy_says(policy, dense):
    kept = by_hand(dense)
    values = {
        "none": kept.attention + kept.mlp,
        "full": dense.dim,
        "selective": kept.residual + kept.selective_attention + 2 * dense.inter_dim,
        "attention": dense.dim + kept.mlp,
    }
    two, three = (kept_bytes(build(replace(dense, n_layers=n), policy)) for n in (2, 3))
    assert three - two == 4 * TOKENS * values[policy]


def test_a_further_layer_of_experts_keeps_only_the_stream_before_them(sparse):
    moe = replace(sparse.moe, balance_loss_weight=0.0)
    two, three = (
        kept_bytes(build(replace(sparse, n_layers=n, moe=moe), "moe")) for n in (2, 3)
    )
    values, load = by_hand(sparse).attention + sparse.dim, 8 * moe.n_routed_experts

    assert three - two == 4 * TOKENS * values + load


def test_a_further_layer_of_experts_keeps_projections_and_dispatch_under_selective(
    sparse,
):
    moe, kept = replace(sparse.moe, balance_loss_weight=0.0), by_hand(sparse)
    two, three = (
        kept_bytes(build(replace(sparse, n_layers=n, moe=moe), "selective"))
        for n in (2, 3)
    )
    choices, shared = moe.n_activated_experts, moe.n_shared_experts
    projections = 2 * (choices + shared) * moe.moe_inter_dim
    values = kept.residual + kept.selective_attention + projections
    values += choices  # their weights
    rows, load = 2 * choices * TOKENS, moe.n_routed_experts  # integers of 8 bytes

    assert three - two == 4 * TOKENS * values + 8 * (rows + load)


def test_one_block_of_every_k_is_kept_as_under_full(dense):
    cfg = replace(dense, n_layers=5)
    none, full, every = (
        kept_bytes(build(cfg, policy, k=2)) for policy in ("none", "full", "every_k")
    )
    assert none - every == (none - full) * 3 // 5


def test_selective_keeps_less_than_none_in_bf16_too(small_model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        none, selective = (
            kept_bytes(build(small_model, policy)) for policy in ("none", "selective")
        )
    assert selective < none


def test_the_final_norm_and_the_row_an_mtp_module_joins_are_not_kept(dense):
    cfg = replace(dense, mtp=MTPConfig())
    blocks = cfg.n_layers + 1
    mixture = ["selective"] * cfg.n_layers
    without, with_module = (
        kept_bytes(build(cfg, [*mixture, last])) for last in ("none", "selective")
    )
    plain, saving = (
        [
            kept_bytes(build(replace(dense, n_layers=n), policy))
            for n in (blocks - 1, blocks)
        ]
        for policy in ("none", "selective")
    )
    layer = (plain[1] - plain[0]) - (saving[1] - saving[0])
    short = SEQ - 1  # its last position has no token to predict
    # Beyond a layer's saving: both norms, their row, and the norm before the head.
    own = 2 * dense.dim + 2 + by_hand(dense).normed
    expected = layer * short // SEQ + 4 * BATCH * short * own

    # And the hidden state itself, of which a plain module keeps a part.
    assert without - with_module == expected + 4 * TOKENS * dense.dim


PRODUCT = 2 * TOKENS
"""Operations of a product with a weight, by the weight's size."""


def test_selective_runs_the_up_projections_again_and_no_other_product(dense):
    mla = dense.attention
    keys_and_values = mla.qk_nope_head_dim + mla.v_head_dim
    up = mla.q_lora_rank * mla.qk_head_dim + mla.kv_lora_rank * keys_and_values
    difference = flops(build(dense, "selective")) - flops(build(dense))

    assert difference == dense.n_layers * PRODUCT * mla.n_heads * up


def test_full_runs_each_block_again_up_to_its_last_product(dense):
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        build(dense).hidden(batch()[0])
    last = dense.inter_dim * dense.dim
    difference = flops(build(dense, "full")) - flops(build(dense))

    assert difference == forward.get_total_flops() - dense.n_layers * PRODUCT * last


def test_shapes_alone_can_be_run_on_meta(sparse):
    model = Transformer(sparse, device="meta")
    plain, *saving = (
        _kept_on("meta", apply_recompute(model, policy))
        for policy in RECOMPUTE_POLICIES
    )
    assert all(0 < kept < plain for kept in saving)


def _kept_on(device, model):
    with AllocationCount() as count:
        loss = model.loss(*(torch.zeros_like(x, device=device) for x in batch()))
        kept = count.live_bytes
    loss.total.backward()
    return kept


@pytest.mark.parametrize("policy", ["none", "full", "selective", "attention"])
def test_a_further_layer_of_fake_tensors_keeps_as_many_bytes_as_a_real_one(
    policy, dense
):
    configs = [replace(dense, n_layers=n) for n in (2, 3)]
    two, three = (kept_bytes(build(cfg, policy)) for cfg in configs)
    models = [
        apply_recompute(Transformer(cfg, device="meta"), policy) for cfg in configs
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_two, fake_three = (_kept_on("cpu", faked(model)) for model in models)

    assert fake_three - fake_two == three - two


def test_measuring_names_the_modules_that_still_keep_something(dense):
    model, mla = build(replace(dense, n_layers=1), "selective"), dense.attention
    tokens, targets = batch()
    report = measure(lambda: model.loss(tokens, targets).total.backward(), model)
    kept = {name: n for name, n in report.by_module.items() if name != "loss"}

    row = 4 * TOKENS
    turns = 8 * SEQ * mla.qk_rope_head_dim // 2
    assert kept == {
        "layers.0.attn_norm": row * dense.dim,
        "layers.0.attn": row * (mla.q_lora_rank + mla.cache_width) + turns,
        "layers.0.attn.wo": row * mla.n_heads * mla.v_head_dim,
        "layers.0.ffn_norm": row * dense.dim,
        "layers.0.ffn": row * 2 * dense.inter_dim,
        "norm": row * dense.dim,
    }
