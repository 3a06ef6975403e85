"""From a ModelConfig to the `config.json` that transformers reads."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from labkit.config.parts import MLAConfig, MoEConfig

if TYPE_CHECKING:
    from labkit.config.model import ModelConfig


def write_hf(cfg: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of a model, in the spelling of transformers 5.

    What that format has no field for stands under its own key, `labkit`.

    Raises:
        ValueError: the attention is not MLA, which DeepSeek's format presumes.
    """
    if not isinstance(cfg.attention, MLAConfig):
        raise ValueError(
            "attention must be MLA to be written in DeepSeek's format; got "
            f"{cfg.attention.kind!r}. Save it with the trainer's checkpoint instead."
        )
    attention, moe = cfg.attention, cfg.moe
    is_v3 = moe is None or moe.score_func == "sigmoid"
    hf: dict[str, Any] = {
        "architectures": [f"DeepseekV{3 if is_v3 else 2}ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "num_hidden_layers": cfg.n_layers,
        "intermediate_size": cfg.inter_dim,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_heads,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "first_k_dense_replace": cfg.n_dense_layers if moe else cfg.n_layers,
        "num_nextn_predict_layers": cfg.n_mtp,
        "max_position_embeddings": cfg.max_seq_len,
        "rms_norm_eps": cfg.norm_eps,
        "initializer_range": cfg.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": _write_rope(cfg),
        "rope_interleave": True,
        "labkit": {"rope": asdict(cfg.rope)},
    }
    if cfg.mtp is not None:
        hf["labkit"]["mtp_loss_weight"] = cfg.mtp.loss_weight
    if moe is None:
        hf["labkit"]["n_dense_layers"] = cfg.n_dense_layers  # unused, but kept
    return hf | (_write_moe(moe) if moe else {"n_routed_experts": None})


def _write_moe(moe: MoEConfig) -> dict[str, Any]:
    is_v3 = moe.score_func == "sigmoid"
    expected = ("top2", True) if is_v3 else ("max", False)
    if (moe.group_score, moe.has_bias) != expected:
        raise ValueError(
            f"a {moe.score_func} router must have group_score={expected[0]!r} and "
            f"has_bias={expected[1]} to be written in DeepSeek's format; got "
            f"{moe.group_score!r} and {moe.has_bias}. Change them with "
            "dataclasses.replace."
        )
    method = "greedy" if moe.n_expert_groups == 1 else "group_limited_greedy"
    return {
        "n_routed_experts": moe.n_routed_experts,
        "num_experts_per_tok": moe.n_activated_experts,
        "moe_intermediate_size": moe.moe_inter_dim,
        "n_shared_experts": moe.n_shared_experts,
        "n_group": moe.n_expert_groups,
        "topk_group": moe.n_limited_groups,
        "scoring_func": moe.score_func,
        "topk_method": "noaux_tc" if is_v3 else method,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.route_scale,
        "aux_loss_alpha": moe.balance_loss_weight,
    }


def _write_rope(cfg: ModelConfig) -> dict[str, Any]:
    rope = cfg.rope
    if not cfg.is_extended:
        return {"rope_type": "default", "rope_theta": rope.rope_theta}
    return {
        "rope_type": "yarn",
        "rope_theta": rope.rope_theta,
        "factor": rope.rope_factor,
        "original_max_position_embeddings": rope.original_seq_len,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
