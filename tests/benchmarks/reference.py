"""The same weights in labkit and in transformers, for side-by-side timings."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from labkit.config import PRESETS, ModelConfig
from labkit.model import Transformer

EXPERT_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
"""Parameters outside the layers: labkit's name, transformers' name."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_layernorm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.wkv_b": "self_attn.kv_b_proj",
    "attn.wo": "self_attn.o_proj",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
    "ffn.gate": "mlp.gate",
    "ffn.experts.w13": "mlp.experts.gate_up_proj",
    "ffn.experts.w2": "mlp.experts.down_proj",
}


def bench_config() -> ModelConfig:
    """Return the benchmark's model of 10M parameters: "small" without extras.

    transformers has neither a balance loss nor MTP in training, so both are off;
    and plain RoPE serves up to 4096 tokens.
    """
    small = PRESETS["small"]
    return replace(
        small,
        mtp=None,
        moe=replace(small.moe, balance_loss_weight=0.0),
        rope=replace(small.rope, original_seq_len=4096),
        max_seq_len=4096,
    )


def reference_name(name: str) -> str:
    """Return transformers' name of a labkit parameter."""
    if name in NAMES:
        return NAMES[name]
    _, index, rest = name.split(".", 2)
    stem = rest.removesuffix(".weight")
    suffix = "" if stem == rest else ".weight"
    return f"model.layers.{index}.{LAYER_NAMES[stem]}{suffix}"


def paired_models(seed: int = 0) -> tuple[Transformer, nn.Module]:
    """Return a labkit model and transformers' model of the same weights."""
    cfg = bench_config()
    ours = Transformer(cfg, generator=torch.Generator().manual_seed(seed))
    hf = {key: value for key, value in cfg.to_hf().items() if key != "labkit"}
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**hf))
    state = theirs.state_dict()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            state[reference_name(name)].copy_(parameter)
    return ours, theirs


def medians(
    runs: dict[str, Callable[[], object]],
    n_rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    n_repeats: int = 1,
) -> dict[str, float]:
    """Return each run's median seconds; they take turns, after one round of warm-up.

    Args:
        runs: what to time, by name.
        n_rounds: turns of each.
        clock: read before and after a run.
        n_repeats: timed runs in a turn. With more than one, the first of a turn is
            not timed: it finds the caches and the allocator as the others left them,
            which the steps of a training run never do.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(n_rounds + 1):
        for name, run in runs.items():
            if n_repeats > 1:
                run()
            for _ in range(n_repeats if round_index else 1):
                start = clock()
                run()
                if round_index:
                    times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def gemm_peak(dtype: torch.dtype, size: int = 1024, n_runs: int = 20) -> float:
    """Return the FLOP/s of a square matrix product: the best of `n_runs`."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    a @ b
    best = float("inf")
    for _ in range(n_runs):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
