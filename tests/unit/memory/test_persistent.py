"""Lasting bytes: a real model with its optimizer, published tables, invariants."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.config import (
    PRESETS,
    GQAConfig,
    Layout,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    TrainConfig,
)
from labkit.memory.persistent import (
    STATES,
    States,
    persistent,
    persistent_by_stage,
    state_bytes,
)
from labkit.memory.report import PERSISTENT
from labkit.memory.shards import shard_params
from labkit.memory.stages import Chunk, Stage, stage_layers
from labkit.model import Transformer
from labkit.training.accumulation import autocast
from labkit.training.optimizer import build_optimizer

TINY, V3 = PRESETS["tiny"], PRESETS["v3-671b"]
FOUR_MOE_LAYERS = Stage(chunks=(Chunk(layers=range(4, 8)),))
GIB = 2**30

MODELS = {
    "MLA, MoE, MTP": TINY,
    "MLA without query rank, softmax router": replace(
        TINY,
        attention=MLAConfig(n_heads=2, kv_lora_rank=24, v_head_dim=40),
        moe=replace(TINY.moe, has_bias=False, n_shared_experts=0),
        mtp=MTPConfig(depth=2),
    ),
    "GQA, MoE": replace(
        TINY, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=16), mtp=None
    ),
    "MHA, dense, MTP": replace(
        TINY, attention=GQAConfig(n_heads=2, n_kv_heads=2, head_dim=10), moe=None
    ),
}


def bytes_after_a_step(
    model: Transformer, dtype: torch.dtype = torch.float32
) -> dict[str, int]:
    """Train one step and return the bytes that this process holds of each part."""
    optimizer = build_optimizer(model, TrainConfig())
    tokens = torch.randint(0, 256, (1, 8))
    with autocast(tokens.device, dtype):
        loss = model.loss(tokens, tokens).total
    loss.backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": held([*model.parameters(), *model.buffers()]),
        "gradients": held([p.grad for p in model.parameters()]),
        "moments": held(states),
    }


def held(tensors: list[Tensor]) -> int:
    """Return the bytes of their storages here; several may lie in one."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = [t.untyped_storage() for t in local]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_a_plain_run_holds_the_predicted_bytes(cfg, dtype):
    assert persistent(cfg, Layout()) == bytes_after_a_step(Transformer(cfg), dtype)


def test_a_model_in_bf16_holds_half_of_all_but_biases_and_counters():
    states = States(weights="bfloat16", gradients="bfloat16", moments="bfloat16")
    model = Transformer(TINY, dtype=torch.bfloat16)

    predicted = persistent(TINY, Layout(), states=states)

    assert predicted == bytes_after_a_step(model)
    assert predicted["gradients"] == 2 * sum(p.numel() for p in model.parameters())


@pytest.fixture
def four_fake_ranks() -> Iterator[None]:
    """Make this process the first of four whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_rank_of_pytorchs_fsdp_holds_the_shares_of_zero_3(four_fake_ranks):
    model = Transformer(TINY)
    mesh = init_device_mesh("cpu", (4,))
    for module in (*model.layers, *(mtp.block for mtp in model.mtp), model):
        fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(model, "loss")

    predicted = persistent(TINY, Layout(dp=4), zero=3)

    assert predicted == bytes_after_a_step(model)


# Bytes per parameter


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [("trainer", 16), ("megatron", 18), ("deepseek-v3", 14), ("deepseek-v3-fp8", 13)],
)
def test_a_parameter_takes_the_published_bytes(name, n_bytes):
    assert STATES[name].bytes_per_param == n_bytes


@pytest.mark.parametrize("n_ranks", [1, 2, 8, 64])
def test_megatrons_distributed_optimizer_takes_6_and_a_share_of_12(n_ranks):
    cfg = replace(TINY, moe=None)
    n_params = cfg.n_params(include_mtp=True)

    parts = persistent(cfg, Layout(dp=n_ranks), states=STATES["megatron"], zero=1)

    total = sum(parts.values())
    assert total / n_params == pytest.approx(6 + 12 / n_ranks, rel=1e-4)


def test_a_master_of_16_bits_completes_the_bf16_weights():
    states = replace(STATES["megatron"], master="int16")

    parts = persistent(TINY, Layout(), states=states)
    assert (
        parts["master"]
        == persistent(TINY, Layout(), states=STATES["megatron"])["master"] // 2
    )
    assert states.bytes_per_param == 16


def test_an_fp8_weight_takes_a_byte_a_value_and_four_a_block():
    moe_layer = Stage(chunks=(Chunk(layers=range(4, 5)),))
    shards = shard_params(V3, Layout(), moe_layer)

    weights = state_bytes(shards, states=STATES["deepseek-v3-fp8"])["weights"]

    experts = 257 * 44_040_192
    projections = 187_107_328 - 1536 - 512
    blocks = (experts + projections) // 128**2 + 7168 // 128 // 2  # wkv_a: 576 = 4.5
    rest = 256 * 7168 + 2 * 7168 + 1536 + 512
    assert weights == experts + projections + 4 * blocks + 2 * rest + 4 * 256


def test_the_fp8_weights_of_v3_with_their_copies_are_the_published_checkpoint():
    weights = persistent(V3, Layout(), states=STATES["deepseek-v3-fp8"])["weights"]
    copies = 2 * 2 * 926_679_040  # MTP's embedding and head are stored again

    assert f"{(weights + copies) / 1e9:.2f}" == "688.57"
    assert f"{(weights + copies) / GIB:.2f}" == "641.29"


# Published tables


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer", "total"),
    [
        (0, 11.64, 23.3, 46.6, 81.54),
        (1, 11.64, 23.3, 5.52, 40.46),
        (2, 11.64, 2.76, 5.52, 19.92),
        (3, 1.38, 2.76, 5.52, 9.66),
    ],
)
def test_the_zero_table_of_2502_07846(zero, weights, gradients, optimizer, total):
    layout = Layout(pp=16, dp=32, tp=2, ep=8)
    cfg = replace(V3, moe=replace(V3.moe, has_bias=False))  # it counts no biases
    shards = shard_params(cfg, layout, FOUR_MOE_LAYERS, convention="paper")

    parts = state_bytes(shards, states=STATES["deepseek-v3"], zero=zero)

    gib = {part: n_bytes / GIB for part, n_bytes in parts.items()}
    assert gib["weights"] == pytest.approx(weights, abs=0.005)
    # Printed with three digits, where there are two before the point.
    assert float(f"{gib['gradients']:.3g}") == gradients
    assert float(f"{gib['master'] + gib['moments']:.3g}") == optimizer
    # Its totals are sums of these rounded parts.
    assert round(weights + gradients + optimizer, 2) == total
    assert sum(gib.values()) == pytest.approx(total, abs=0.05)


def test_the_states_of_v3_in_the_report_of_megatron_core():
    """Of arXiv 2603.07685: PP4 VPP4 EP64 on 256 GPUs, 36.4 and 32.1 "GB".

    Read as GiB of the second rank, whose 16 layers all have experts; embedding, dense
    layers and MTP lie on the first and the last.
    """
    layout = Layout(pp=4, dp=64, ep=64, vpp=4)
    stage = stage_layers(V3, layout)[1]
    assert stage.contents(V3).n_sparse == 16

    parts = persistent(V3, layout, stage=stage, states=STATES["megatron"], zero=1)

    model = (parts["weights"] + parts["gradients"]) / GIB
    optimizer = (parts["master"] + parts["moments"]) / GIB
    assert (f"{model:.2f}", f"{optimizer:.2f}") == ("36.58", "32.15")
    assert model == pytest.approx(36.4, rel=0.006)
    assert optimizer == pytest.approx(32.1, rel=0.002)


@pytest.mark.parametrize(
    ("dim", "n_layers", "pp"), [(6144, 48, 1), (12_288, 96, 8)], ids=["22B", "175B"]
)
def test_the_states_of_korthikanti(dim, n_layers, pp):
    """Of arXiv 2205.05198, TP8: 45.56 GiB of both, layers alone.

    An FFN of two matrices of 4 d is as large as SwiGLU's three of 8/3 d.
    """
    attention = GQAConfig(n_heads=dim // 128, n_kv_heads=dim // 128)
    cfg = ModelConfig(
        vocab_size=51_200,
        dim=dim,
        n_layers=n_layers,
        inter_dim=8 * dim // 3,
        attention=attention,
    )
    layers = Stage(chunks=(Chunk(layers=range(n_layers // pp)),))

    parts = persistent(
        cfg, Layout(pp=pp, tp=8), stage=layers, states=STATES["megatron"]
    )

    assert sum(parts.values()) / GIB == pytest.approx(45.56, rel=5e-4)


# What holds for every layout


@given(
    dp=st.sampled_from([1, 2, 3, 8, 100]),
    cp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    name=st.sampled_from(sorted(STATES)),
)
def test_the_shares_of_all_ranks_are_the_whole_and_hardly_more(dp, cp, zero, name):
    whole = persistent(TINY, Layout(), states=STATES[name])

    shared = persistent(TINY, Layout(dp=dp, cp=cp), states=STATES[name], zero=zero)

    assert list(shared) == list(whole)
    # Every rank has all router biases, and a step count for each tensor.
    shards = shard_params(TINY, Layout())
    n_tensors = sum(bucket.n_tensors for bucket in shards.buckets)
    not_shared = {
        "weights": 4 * shards.n_biases,
        "moments": 4 * n_tensors * STATES[name].has_counters,
    }
    shared_from = {"weights": 3, "master": 1, "gradients": 2, "moments": 1}
    for part, n_bytes in whole.items():
        n_shares = dp * cp if zero >= shared_from[part] else 1
        own = not_shared.get(part, 0)
        excess = n_shares * (shared[part] - own) - (n_bytes - own)
        assert 0 <= excess < 3 * n_shares  # each bucket is rounded up


def test_zero_shares_experts_between_fewer_ranks():
    layout = Layout(dp=8, ep=8)
    whole = persistent(TINY, layout, states=STATES["megatron"])
    shared = persistent(TINY, layout, states=STATES["megatron"], zero=1)

    n_expert = shard_params(TINY, layout).expert.n_params
    n_dense = shard_params(TINY, layout).n_params - n_expert
    assert whole["master"] == 4 * (n_dense + n_expert)
    assert shared["master"] == 4 * n_dense // 8 + 4 * n_expert


def test_dualpipe_doubles_weights_and_gradients_but_not_what_zero_shares():
    cfg = replace(TINY, n_layers=4, n_dense_layers=0, mtp=None)
    layout, states = Layout(pp=2, dp=2), STATES["deepseek-v3"]
    once = persistent_by_stage(
        cfg, layout, stage_layers(cfg, layout), states=states, zero=1
    )
    twice = persistent_by_stage(
        cfg,
        layout,
        stage_layers(cfg, layout, schedule="dualpipe"),
        states=states,
        zero=1,
    )

    for part in ("weights", "gradients"):
        assert twice[0][part] == once[0][part] + once[1][part]
    for part in ("master", "moments"):
        both = once[0][part] + once[1][part]
        assert twice[0][part] == both // 2


def test_the_stages_are_counted_one_by_one():
    layout = Layout(pp=16, dp=128, ep=64)
    stages = stage_layers(V3, layout)

    by_stage = persistent_by_stage(V3, layout, stages, zero=1)

    assert by_stage == [persistent(V3, layout, stage=s, zero=1) for s in stages]
    assert by_stage[1] is not by_stage[2]


def test_parts_come_in_the_order_of_the_report_and_empty_ones_are_left_out():
    assert tuple(persistent(TINY, Layout())) == ("weights", "gradients", "moments")
    assert tuple(persistent(TINY, Layout(), states=STATES["megatron"])) == PERSISTENT


# Refusals


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"weights": "int4"},
            "weights must be one of 'float32', 'bfloat16', 'fp8'; got 'int4'.",
        ),
        (
            {"has_buffer": "x"},
            "has_buffer must be True or False; got 'x'. Set has_buff",
        ),
        (
            {"has_counters": 1},
            "has_counters must be True or False; got 1. Set has_coun",
        ),
        ({"moments": "fp8"}, "moments must be one of 'float32', 'bfloat16'; got 'fp8'"),
        ({"master": "bfloat16"}, "master must be one of 'float32', 'int16'; got 'bfl"),
        (
            {"weights": "fp8"},
            "master must be 'float32' when weights are 'fp8', because an update is "
            "smaller than a step of FP8; got None. Set master='float32'.",
        ),
        (
            {"master": "int16"},
            "master='int16' keeps what BF16 weights lack of FP32; got "
            "weights='float32'. Set weights='bfloat16', or another master.",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_states_that_cannot_be_are_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        States(**choice)


@pytest.mark.parametrize("zero", [-1, 4, True, 1.0])
@pytest.mark.usefixtures("unchecked")
def test_an_unknown_stage_of_zero_is_refused(zero):
    message = "zero must be 0, 1, 2 or 3: ZeRO shares out nothing, .*; got "
    with pytest.raises(ValueError, match=message + str(zero)):
        persistent(TINY, Layout(), zero=zero)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cfg": "tiny"}, "cfg must be of type ModelConfig; got 'tiny'."),
        ({"layout": None}, "layout must be of type Layout; got None."),
        ({"stage": 0}, "stage must be of type Stage or None; got 0."),
        ({"stage": ()}, r"stage must be of type Stage or None; got \(\)."),
        ({"states": "megatron"}, r"got 'megatron'. Set states=STATES\['megatron'\],"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_another_type_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        persistent(**({"cfg": TINY, "layout": Layout()} | options))
