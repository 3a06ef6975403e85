"""What `predict` says of two runs of Megatron whose memory was reported.

DeepSeek-V3 on 256 GPUs (arXiv 2603.07685, section 4.1), and Moonlight-16B on 8
(Megatron-Bridge, its measurements of activation recompute). A run's layout, states and
rank are read once, for all of its figures.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from labkit.config import (
    PRESETS,
    Layout,
    MLAConfig,
    ModelConfig,
    RopeConfig,
    TrainConfig,
)
from labkit.memory.activations import block_tape
from labkit.memory.persistent import STATES, States
from labkit.memory.playback import kept_by_part
from labkit.memory.predict import predict, rank_pass
from labkit.memory.published import routed_rows
from labkit.memory.ranks import rank_tape
from labkit.memory.stages import in_flight, stage_layers
from labkit.memory.tape import BF16_BYTES

SEQ_LEN = 4096

Figures = Iterator[tuple[str, float]]
"""Items of one source: bytes, parameters, or a share."""

V3 = PRESETS["v3-671b"]

MEGATRON_MOE = Layout(pp=4, dp=64, ep=64, vpp=4)
"""Of arXiv 2603.07685."""

MEGATRON_MOE_SPLIT = (*[4] * 15, 1)
"""Layers of its 16 virtual stages; MTP and loss are with the last."""

MEGATRON_MOE_TRAIN = TrainConfig(global_batch=2048, micro_batch=1, seq_len=SEQ_LEN)

MOONLIGHT = replace(
    PRESETS["v2-lite-16b"],
    vocab_size=163_840,
    inter_dim=11_264,
    moe=replace(
        PRESETS["v2-lite-16b"].moe,
        score_func="sigmoid",
        has_bias=True,
        norm_topk_prob=True,
        route_scale=2.446,
    ),
    rope=RopeConfig(rope_theta=50_000.0),
    max_seq_len=8192,
)
"""Moonlight-16B-A3B, with the sizes of its `config.json`."""

MOONLIGHT_RUN = Layout(dp=4, tp=2, ep=8)

MOONLIGHT_TRAIN = TrainConfig(global_batch=4, micro_batch=1, seq_len=SEQ_LEN)

MOONLIGHT_STATES = States(
    weights="bfloat16",
    master="int16",
    gradients="bfloat16",
    moments="bfloat16",
    has_buffer=True,
    has_counters=False,
)


def megatron_moe() -> Figures:
    """Yield the parts of one GPU that trains DeepSeek-V3 (arXiv 2603.07685, 4.1)."""
    layout, train = MEGATRON_MOE, MEGATRON_MOE_TRAIN
    fuller, other = _megatron_moe_ranks()
    states = fuller["weights"] + fuller["gradients"]
    optimizer = fuller["master"] + fuller["moments"]
    activations = _kept(fuller)
    yield "weights and gradients", states
    yield "main weights and optimizer", optimizer
    yield "activations", activations
    yield "activations, the other such rank", _kept(other)
    yield "total", states + optimizer + activations
    yield "results of experts", fuller["dispatch"]
    stage = stage_layers(V3, layout, layers_per_stage=MEGATRON_MOE_SPLIT)[1]
    n_kept = in_flight(layout, 1, train.global_batch // layout.dp)
    n_layers = sum(
        n * len(chunk.layers) for n, chunk in zip(n_kept, stage.chunks, strict=True)
    )
    yield "queries, keys and values", n_layers * _core_bytes(V3, layout)
    yield "results of norms", n_layers * _norm_bytes(V3, layout)


def _megatron_moe_ranks() -> tuple[dict[str, int], ...]:
    """Return the parts of both pipeline ranks that hold MoE layers and nothing else."""
    report = predict(
        V3,
        MEGATRON_MOE_TRAIN,
        MEGATRON_MOE,
        "gpu",
        states=STATES["megatron"],
        zero=1,
        layers_per_stage=MEGATRON_MOE_SPLIT,
    )
    return tuple(report.by_stage[rank].by_part for rank in (1, 2))


def _kept(by_part: Mapping[str, int]) -> int:
    return by_part["activations"] + by_part["dispatch"]


def _core_bytes(cfg: ModelConfig, layout: Layout) -> float:
    """Return the bytes of queries, keys and values of one layer and sequence."""
    mla = cfg.attention
    assert isinstance(mla, MLAConfig)
    width = mla.n_heads * (2 * mla.qk_head_dim + mla.v_head_dim)
    return BF16_BYTES * SEQ_LEN * width / layout.tp


def _norm_bytes(cfg: ModelConfig, layout: Layout) -> float:
    """Return the bytes of what both norms of a layer give, for one sequence."""
    return 2 * BF16_BYTES * SEQ_LEN * cfg.dim / layout.tp


def moonlight() -> Figures:
    """Yield peaks of Moonlight-16B on 8 GPUs, by what is computed again."""
    cfg, layout = MOONLIGHT, MOONLIGHT_RUN
    rows = routed_rows(cfg.moe, SEQ_LEN, layout)
    products = cfg.n_moe_layers * BF16_BYTES * rows * cfg.moe.moe_inter_dim
    core = cfg.n_layers * _core_bytes(cfg, layout)
    norms = cfg.n_layers * _norm_bytes(cfg, layout)
    saved: Mapping[str, float] = {
        "mla_up_proj": core,
        "mla_up_proj and mlp": core + _dense_bytes(cfg, layout),
        "moe_act": products,
        "layernorm and moe_act": norms + products,
    }
    plain = _moonlight_peak(MOONLIGHT_STATES) + products
    yield "peak, no recompute", plain
    exact = replace(MOONLIGHT_STATES, master="float32")
    peak = _moonlight_peak(exact) + products
    yield "peak, no recompute, FP32 master weights", peak
    yield "peak, core_attn", plain
    for modules, n_bytes in saved.items():
        yield f"peak, {modules}", plain - n_bytes
        yield f"saved by {modules}", n_bytes


def _moonlight_peak(states: States) -> int:
    """Return the predicted peak of one GPU, all of which hold as much."""
    return predict(
        MOONLIGHT, MOONLIGHT_TRAIN, MOONLIGHT_RUN, "gpu", states=states, zero=1
    ).peak


def _dense_bytes(cfg: ModelConfig, layout: Layout) -> float:
    """Return the bytes that a dense network keeps beside its input."""
    step = rank_pass(cfg, MOONLIGHT_TRAIN, layout, "gpu", states=MOONLIGHT_STATES)
    tape = block_tape(cfg, step, is_dense=True, stream=torch.bfloat16)
    inside = [
        op._replace(kept=op.kept if op.module != "ffn.w1" else ())
        for op in tape
        if op.module.split(".")[0] == "ffn"
    ]
    return sum(kept_by_part(rank_tape(inside, layout)).values())
