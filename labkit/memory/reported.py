"""What labkit computes for tables and runs whose memory others have reported.

Their figures stand in `data/published_memory.csv`; `labkit.memory.comparison` puts both
side by side. Here are tables and closed forms, in `labkit.memory.reported_runs` what
`predict` says: models, layouts, and which of labkit's functions answers which row. A
reading of a source holds for all of its rows, and none has a factor of its own.
"""

from dataclasses import replace
from math import prod

from labkit.config import GQAConfig, Layout, ModelConfig
from labkit.memory.persistent import STATES, state_bytes
from labkit.memory.published import (
    gpt_bytes,
    mla_bytes,
    moe_bytes,
    recomputed_bytes,
    routed_rows,
)
from labkit.memory.reported_runs import SEQ_LEN, V3, Figures, megatron_moe, moonlight
from labkit.memory.shards import Shards, shard_params
from labkit.memory.stages import Chunk, Stage, in_flight, stage_layers
from labkit.memory.tape import BF16_BYTES, EXACT_BYTES
from labkit.memory.weights import Weight, layer_weights

GIB = 2**30

V3_MAIN = replace(V3, mtp=None)

MEMORY_ANALYSIS = Layout(pp=16, dp=32, tp=2, ep=8)
"""Of arXiv 2502.07846."""

MEGATRON_7B = ModelConfig(
    vocab_size=131_072,
    dim=4096,
    n_layers=32,
    inter_dim=10_924,
    attention=GQAConfig(n_heads=32, n_kv_heads=8),
    moe=None,
    max_seq_len=8192,
)
"""Of a functional test of Megatron-LM; its network has two matrices, 16,384 wide."""

GPT_22B = ModelConfig(
    vocab_size=51_200,
    dim=6144,
    n_layers=48,
    inter_dim=16_384,
    attention=GQAConfig(n_heads=64, n_kv_heads=64, head_dim=96),
    moe=None,
)
"""Of arXiv 2205.05198; its network has two matrices of four times the width."""

GPT_175B = replace(
    GPT_22B,
    dim=12_288,
    n_layers=96,
    inter_dim=32_768,
    attention=GQAConfig(n_heads=96, n_kv_heads=96),
)


def reported_figures() -> dict[tuple[str, str], float]:
    """Return what labkit computes for each section and item of the table.

    >>> round(reported_figures()["2502.07846", "weights"] / 2**30, 2)
    11.64
    """
    sections = {
        "2502.07846": (_stages, _device, _zero_stages, _formulas),
        "2603.07685": (megatron_moe,),
        "moonlight-16b": (moonlight,),
        "2205.05198": (_gpt_states, _gpt_activations),
        "megatron-7b": (_megatron_7b,),
    }
    return {
        (section, item): figure
        for section, parts in sections.items()
        for part in parts
        for item, figure in part()
    }


def _stages() -> Figures:
    layout = Layout(pp=16)
    stages = stage_layers(V3_MAIN, layout, layers_per_stage=[*[4] * 15, 1])
    sizes = [shard_params(V3_MAIN, layout, stage).n_params for stage in stages]
    assert len(set(sizes[1:15])) == 1
    for name, index in (("stage 0", 0), ("stages 1 to 14", 1), ("stage 15", 15)):
        layers = [
            shard_params(V3_MAIN, layout, layer).n_params
            for layer in _one_by_one(stages[index])
        ]
        yield f"parameters of {name}", sum(map(_billions_as_printed, layers))
        yield f"BF16 weights of {name}", BF16_BYTES * sizes[index]
    yield "parameters of all stages", sum(sizes)
    yield "BF16 weights of all stages", BF16_BYTES * sum(sizes)


def _one_by_one(stage: Stage) -> list[Stage]:
    """Return a stage for each layer of this one's only chunk."""
    (chunk,) = stage.chunks
    singles = [
        Chunk(
            layers=range(index, index + 1),
            is_first=chunk.is_first and index == chunk.layers[0],
            is_last=chunk.is_last and index == chunk.layers[-1],
        )
        for index in chunk.layers
    ]
    return [Stage(chunks=(single,)) for single in singles]


def _billions_as_printed(n_params: int) -> float:
    """Return parameters as the paper prints billions: one decimal, two below 1."""
    billions = n_params / 1e9
    return round(billions, 1 if billions >= 1 else 2) * 1e9


def _device_shards() -> Shards:
    stage = Stage(chunks=(Chunk(layers=range(4, 8)),))
    return shard_params(V3_MAIN, MEMORY_ANALYSIS, stage, convention="paper")


def _device() -> Figures:
    shards, weights = _device_shards(), layer_weights(V3_MAIN, is_dense=False)
    norms = 4 * sum(prod(w.shape) for w in weights if w.name.endswith("norm.weight"))
    split, whole = shards.split.n_params, shards.replicated.n_params - norms
    yield "split parameters of MLA", split
    yield "replicated parameters of MLA", whole
    yield "parameters of MLA", split + whole
    yield "parameters of norms", norms
    yield "parameters without MoE", split + whole + norms
    yield "parameters of MoE", shards.expert.n_params
    yield "parameters of a device", shards.n_params
    yield "BF16 weights of a device in bytes", BF16_BYTES * shards.n_params
    yield "BF16 weights of a device", BF16_BYTES * shards.n_params


def _zero_stages() -> Figures:
    shards = _device_shards()
    for zero in range(4):
        held = state_bytes(shards, states=STATES["deepseek-v3"], zero=zero)
        optimizer = held["master"] + held["moments"]
        parts = held["weights"], held["gradients"], optimizer
        yield f"states, ZeRO {zero}", sum(_as_printed(n_bytes) for n_bytes in parts)
        for first, name, n_bytes in zip(
            (3, 2, 1), ("weights", "gradients", "optimizer"), parts, strict=True
        ):
            if zero == 0:
                yield name, n_bytes
            elif zero == first:
                yield f"{name}, ZeRO {zero}", n_bytes


def _as_printed(n_bytes: int) -> float:
    """Return bytes as the paper prints GiB: two decimals, or one from 20 on."""
    gib = n_bytes / GIB
    return round(gib, 1 if gib >= 20 else 2) * GIB


def _formulas() -> Figures:
    cfg, layout = V3_MAIN, MEMORY_ANALYSIS
    recomputed = 4 * recomputed_bytes(cfg, SEQ_LEN, layout)
    yield "full recompute, four layers, in bytes", recomputed
    yield "full recompute, four layers", recomputed
    mla = 4 * mla_bytes(cfg, 1, SEQ_LEN, layout, is_flash=True)
    scores = 4 * mla_bytes(cfg, 1, SEQ_LEN, layout) - mla
    paper, physical = (
        4 * moe_bytes(cfg, SEQ_LEN, layout, rows)
        for rows in (
            routed_rows(cfg.moe, SEQ_LEN, layout, routing="paper"),
            routed_rows(cfg.moe, SEQ_LEN, layout, routing="physical"),
        )
    )
    yield "MLA without scores, four layers", mla
    yield "scores, four layers", scores
    yield "MoE, four layers", paper
    yield "activations, four layers", mla + scores + paper
    yield "activations without scores, four layers", mla + paper
    yield "MoE with the rows of other ranks, four layers", physical
    total = mla + physical
    yield "activations with the rows of other ranks, four layers", total


def _gpt_states() -> Figures:
    for name, cfg, layout in (
        ("22B", GPT_22B, Layout(tp=8)),
        ("175B", GPT_175B, Layout(pp=8, tp=8)),
    ):
        layers = range(cfg.n_layers // layout.pp)
        shards = shard_params(cfg, layout, Stage(chunks=(Chunk(layers=layers),)))
        held = state_bytes(shards, states=STATES["megatron"])
        yield f"states, {name}", sum(held.values())


def _gpt_activations() -> Figures:
    selective = "activations with selective recompute and sequence parallelism"
    interleaved = Layout(pp=8, tp=8, vpp=3)
    n_kept = sum(in_flight(interleaved, 0, 64))  # chunks of 4 layers
    for name, cfg, batch, n_layers in (
        ("22B", GPT_22B, 4, GPT_22B.n_layers),
        ("175B", GPT_175B, 1, 4 * n_kept),
    ):
        n_values, scores = batch * 2048 * cfg.dim, _scores_per_value(cfg)
        plain, least = (
            gpt_bytes(n_values, scores, tp=8, policy=policy)
            for policy in ("none", "both")
        )
        yield f"activations, {name}", n_layers * plain
        yield f"{selective}, {name}", n_layers * least
    scores = _scores_per_value(GPT_175B)
    for policy, name in (
        ("sequence", "sequence parallelism"),
        ("selective", "selective recompute"),
        ("both", "both"),
        ("full", "full recompute"),
    ):
        share = gpt_bytes(1, scores, tp=8, policy=policy) / gpt_bytes(1, scores, tp=8)
        yield f"share kept under {name}, 175B", share


def _scores_per_value(cfg: ModelConfig) -> float:
    return cfg.attention.n_heads * 2048 / cfg.dim


def _megatron_7b() -> Figures:
    cfg, layout, batch = MEGATRON_7B, Layout(dp=2, tp=4), 2
    shards = shard_params(cfg, layout)
    positions = Weight("positions.weight", (cfg.max_seq_len, cfg.dim))
    shards.replicated.add(positions, layout, 1)
    steady = sum(state_bytes(shards, states=STATES["megatron"], zero=1).values())
    n_tokens = batch * cfg.max_seq_len
    layer = gpt_bytes(n_tokens * cfg.dim, 0, tp=layout.tp)
    heads = cfg.attention.n_heads - cfg.attention.n_kv_heads
    layer -= 2 * BF16_BYTES * n_tokens * heads * cfg.attention.head_dim / layout.tp
    logits = EXACT_BYTES * n_tokens * cfg.vocab_size / layout.tp
    yield "steady", steady
    yield "peak", steady + cfg.n_layers * layer + logits
