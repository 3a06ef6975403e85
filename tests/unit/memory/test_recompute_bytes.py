"""What every policy keeps, to the byte, and which products it runs again."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from labkit.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from labkit.memory import AllocationCount
from labkit.memory.fakes import faked
from labkit.memory.measure import measure
from labkit.memory.recompute import RECOMPUTE_POLICIES, apply_recompute
from labkit.model import Transformer

BATCH, SEQ = 2, 16
TOKENS = BATCH * SEQ

MLA = MLAConfig(
    n_heads=2,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
DENSE = ModelConfig(
    vocab_size=32,
    dim=16,
    n_layers=2,
    inter_dim=24,
    attention=MLA,
    max_seq_len=64,
    init_std=0.1,
)
MOE = MoEConfig(
    n_routed_experts=4,
    n_activated_experts=2,
    moe_inter_dim=8,
    balance_loss_weight=1e-2,
)
SPARSE = replace(DENSE, moe=MOE, n_dense_layers=1)
CONFIGS = {
    "dense": DENSE,
    "no query rank": replace(DENSE, attention=replace(MLA, q_lora_rank=None)),
    "sparse": SPARSE,
    "multi-token": replace(SPARSE, mtp=MTPConfig(depth=2)),
    "grouped-query": replace(
        SPARSE, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=8)
    ),
}


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


RESIDUAL = 2 * DENSE.dim
"""The residual stream before attention, and before the feed-forward network."""

NORMED = DENSE.dim + 1
"""What a norm leaves its readers, and the inverse root mean square it kept."""

SELECTIVE_MLA = MLA.q_lora_rank + MLA.cache_width + MLA.n_heads * MLA.v_head_dim
"""Compressed queries and keys, and what attention gives the output projection."""


WIDTH = MLA.qk_nope_head_dim + MLA.v_head_dim
"""Of a head's keys without rotation, and its values."""

PLAIN_ATTENTION = (
    (RESIDUAL - DENSE.dim + NORMED)
    + (MLA.q_lora_rank + MLA.q_lora_rank + 1)
    + (MLA.cache_width + MLA.kv_lora_rank + 1)
    + MLA.n_heads * (2 * MLA.qk_head_dim + MLA.v_head_dim)  # q, k, v of the core
    + MLA.n_heads * MLA.v_head_dim
)
"""Without a policy, in the order in which they are made."""

PLAIN_MLP = DENSE.dim + NORMED + 4 * DENSE.inter_dim


@pytest.mark.parametrize(
    ("policy", "values"),
    [
        ("none", PLAIN_ATTENTION + PLAIN_MLP),
        ("full", DENSE.dim),
        ("selective", RESIDUAL + SELECTIVE_MLA + 2 * DENSE.inter_dim),
        ("attention", DENSE.dim + PLAIN_MLP),
    ],
)
def test_a_further_dense_layer_keeps_what_its_policy_says(policy, values):
    two, three = (kept_bytes(build(replace(DENSE, n_layers=n), policy)) for n in (2, 3))
    assert three - two == 4 * TOKENS * values


def test_a_further_layer_of_experts_keeps_only_the_stream_before_them():
    moe = replace(MOE, balance_loss_weight=0.0)
    two, three = (
        kept_bytes(build(replace(SPARSE, n_layers=n, moe=moe), "moe")) for n in (2, 3)
    )
    load = 8 * MOE.n_routed_experts

    assert three - two == 4 * TOKENS * (PLAIN_ATTENTION + DENSE.dim) + load


def test_a_further_layer_of_experts_keeps_projections_and_dispatch_under_selective():
    moe = replace(MOE, balance_loss_weight=0.0)
    two, three = (
        kept_bytes(build(replace(SPARSE, n_layers=n, moe=moe), "selective"))
        for n in (2, 3)
    )
    choices, shared = MOE.n_activated_experts, MOE.n_shared_experts
    projections = 2 * (choices + shared) * MOE.moe_inter_dim
    values = RESIDUAL + SELECTIVE_MLA + projections + choices  # and their weights
    rows, load = 2 * choices * TOKENS, MOE.n_routed_experts  # integers of 8 bytes

    assert three - two == 4 * TOKENS * values + 8 * (rows + load)


def test_one_block_of_every_k_is_kept_as_under_full():
    cfg = replace(DENSE, n_layers=5)
    none, full, every = (
        kept_bytes(build(cfg, policy, k=2)) for policy in ("none", "full", "every_k")
    )
    assert none - every == (none - full) * 3 // 5


@pytest.mark.parametrize("name", CONFIGS)
def test_selective_keeps_less_than_none_in_bf16_too(name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        none, selective = (
            kept_bytes(build(CONFIGS[name], policy)) for policy in ("none", "selective")
        )
    assert selective < none


def test_the_final_norm_and_the_row_an_mtp_module_joins_are_not_kept():
    cfg = replace(DENSE, mtp=MTPConfig())
    blocks = cfg.n_layers + 1
    mixture = ["selective"] * cfg.n_layers
    without, with_module = (
        kept_bytes(build(cfg, [*mixture, last])) for last in ("none", "selective")
    )
    layer = kept_bytes(build(replace(DENSE, n_layers=blocks))) - kept_bytes(
        build(replace(DENSE, n_layers=blocks - 1))
    )
    layer -= kept_bytes(
        build(replace(DENSE, n_layers=blocks), "selective")
    ) - kept_bytes(build(replace(DENSE, n_layers=blocks - 1), "selective"))
    short = SEQ - 1  # its last position has no token to predict
    # Beyond a layer's saving: both norms, their row, and the norm before the head.
    own = 2 * DENSE.dim + 2 + NORMED
    expected = layer * short // SEQ + 4 * BATCH * short * own

    # And the hidden state itself, of which a plain module keeps a part.
    assert without - with_module == expected + 4 * TOKENS * DENSE.dim


PRODUCT = 2 * TOKENS
"""Operations of a product with a weight, by the weight's size."""


def test_selective_runs_the_up_projections_again_and_no_other_product():
    keys_and_values = MLA.qk_nope_head_dim + MLA.v_head_dim
    up = MLA.q_lora_rank * MLA.qk_head_dim + MLA.kv_lora_rank * keys_and_values
    difference = flops(build(DENSE, "selective")) - flops(build(DENSE))

    assert difference == DENSE.n_layers * PRODUCT * MLA.n_heads * up


def test_full_runs_each_block_again_up_to_its_last_product():
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        build(DENSE).hidden(batch()[0])
    last = DENSE.inter_dim * DENSE.dim
    difference = flops(build(DENSE, "full")) - flops(build(DENSE))

    assert difference == forward.get_total_flops() - DENSE.n_layers * PRODUCT * last


def test_shapes_alone_can_be_run_on_meta():
    model = Transformer(SPARSE, device="meta")
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
def test_a_further_layer_of_fake_tensors_keeps_as_many_bytes_as_a_real_one(policy):
    configs = [replace(DENSE, n_layers=n) for n in (2, 3)]
    two, three = (kept_bytes(build(cfg, policy)) for cfg in configs)
    models = [
        apply_recompute(Transformer(cfg, device="meta"), policy) for cfg in configs
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_two, fake_three = (_kept_on("cpu", faked(model)) for model in models)

    assert fake_three - fake_two == three - two


def test_measuring_names_the_modules_that_still_keep_something():
    model = build(replace(DENSE, n_layers=1), "selective")
    tokens, targets = batch()
    report = measure(lambda: model.loss(tokens, targets).total.backward(), model)
    kept = {name: n for name, n in report.by_module.items() if name != "loss"}

    row = 4 * TOKENS
    turns = 8 * SEQ * MLA.qk_rope_head_dim // 2
    assert kept == {
        "layers.0.attn_norm": row * DENSE.dim,
        "layers.0.attn": row * (MLA.q_lora_rank + MLA.cache_width) + turns,
        "layers.0.attn.wo": row * MLA.n_heads * MLA.v_head_dim,
        "layers.0.ffn_norm": row * DENSE.dim,
        "layers.0.ffn": row * 2 * DENSE.inter_dim,
        "norm": row * DENSE.dim,
    }
