"""Between a Hugging Face `config.json` and the fields of a ModelConfig.

Both spellings of the rotary settings are read: `rope_theta` with `rope_scaling`
(as published), and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config.parts import MLAConfig, MoEConfig, MTPConfig, RopeConfig

if TYPE_CHECKING:
    from labkit.config.model import ModelConfig

KNOWN_TYPES = ("deepseek_v2", "deepseek_v3")

TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


def read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelConfig fields that a `config.json` describes.

    Raises:
        ValueError: not a DeepSeek-V2/V3 config, or a field missing or unusable.
    """
    hf = _contents(source)
    model_type = hf.get("model_type", "deepseek_v3")
    if model_type not in KNOWN_TYPES:
        raise ValueError(
            f"model_type must be one of {', '.join(KNOWN_TYPES)}; got {model_type!r}. "
            "labkit builds DeepSeek-V2/V3 architectures only."
        )
    if hf.get("tie_word_embeddings") or hf.get("attention_bias"):
        is_tied = hf.get("tie_word_embeddings")
        field = "tie_word_embeddings" if is_tied else "attention_bias"
        raise ValueError(
            f"{field} must be false, as in every DeepSeek-V2/V3 "
            "release; got true. Untie or retrain the model before loading it here."
        )
    is_v3 = model_type == "deepseek_v3"
    extra = hf.get("labkit", {})
    return {
        "vocab_size": _field(hf, "vocab_size"),
        "dim": _field(hf, "hidden_size"),
        "n_layers": _field(hf, "num_hidden_layers"),
        "inter_dim": _field(hf, "intermediate_size"),
        "attention": _read_attention(hf),
        "moe": _read_moe(hf, is_v3) if hf.get("n_routed_experts") else None,
        "n_dense_layers": _read_dense_layers(hf, extra),
        "rope": _read_rope(hf, extra),
        "mtp": _read_mtp(hf, extra),
        "max_seq_len": _field(hf, "max_position_embeddings"),
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "init_std": hf.get("initializer_range", 0.006),
    }


def write(cfg: ModelConfig) -> dict[str, Any]:
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


def _contents(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"config must be a config.json or a folder that holds one; found none at "
            f"{path}. Give the path of the downloaded model."
        )
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"config must be valid JSON; {path} is not ({error}). Download it again."
        ) from error
    if not isinstance(contents, dict):
        raise ValueError(
            f"config must be a JSON object; {path} holds a {type(contents).__name__}. "
            "Download it again."
        )
    return contents


def _field(hf: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    if hf.get(name) is None:
        raise ValueError(
            f"config.json must have {name}; it is missing. Take the file that was "
            "published with the weights."
        )
    return hf[name]


def _read_dense_layers(hf: Mapping[str, Any], extra: Mapping[str, Any]) -> int:
    if not hf.get("n_routed_experts") and "n_dense_layers" in extra:
        return extra["n_dense_layers"]
    return hf.get("first_k_dense_replace") or 0


def _read_attention(hf: Mapping[str, Any]) -> MLAConfig:
    return MLAConfig(
        n_heads=_field(hf, "num_attention_heads"),
        q_lora_rank=hf.get("q_lora_rank") or None,
        kv_lora_rank=_field(hf, "kv_lora_rank"),
        qk_nope_head_dim=_field(hf, "qk_nope_head_dim"),
        qk_rope_head_dim=_field(hf, "qk_rope_head_dim"),
        v_head_dim=_field(hf, "v_head_dim"),
    )


def _read_moe(hf: Mapping[str, Any], is_v3: bool) -> MoEConfig:
    if hf.get("moe_layer_freq", 1) != 1:
        raise ValueError(
            "moe_layer_freq must be 1, as in every DeepSeek-V2/V3 release; got "
            f"{hf['moe_layer_freq']}. labkit puts experts into every layer after the "
            "dense ones."
        )
    method = hf.get("topk_method", "noaux_tc" if is_v3 else "greedy")
    if method not in TOPK_METHODS:
        raise ValueError(
            f"topk_method must be one of {', '.join(TOPK_METHODS)}; got {method!r}. "
            "DeepSeek-V2 and V3 choose their experts in these ways only."
        )
    is_grouped = method != "greedy"
    return MoEConfig(
        n_routed_experts=hf["n_routed_experts"],
        n_activated_experts=_field(hf, "num_experts_per_tok"),
        moe_inter_dim=_field(hf, "moe_intermediate_size"),
        n_shared_experts=hf.get("n_shared_experts") or 0,
        n_expert_groups=(hf.get("n_group") or 1) if is_grouped else 1,
        n_limited_groups=(hf.get("topk_group") or 1) if is_grouped else 1,
        score_func=hf.get("scoring_func", "sigmoid" if is_v3 else "softmax"),
        group_score="top2" if method == "noaux_tc" else "max",
        has_bias=method == "noaux_tc",
        norm_topk_prob=bool(hf.get("norm_topk_prob", is_v3)),
        route_scale=hf.get("routed_scaling_factor", 1.0),
        balance_loss_weight=hf.get("aux_loss_alpha", 1e-4),
    )


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


def _read_mtp(hf: Mapping[str, Any], extra: Mapping[str, Any]) -> MTPConfig | None:
    depth = hf.get("num_nextn_predict_layers", hf.get("num_mtp_layers"))
    weight = extra.get("mtp_loss_weight", MTPConfig().loss_weight)
    return MTPConfig(depth=depth, loss_weight=weight) if depth else None


def _read_rope(hf: Mapping[str, Any], extra: Mapping[str, Any]) -> RopeConfig:
    if "rope" in extra:
        return RopeConfig(**extra["rope"])
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", hf.get("rope_theta", 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(
            rope_theta=theta, original_seq_len=_field(hf, "max_position_embeddings")
        )
    if kind != "yarn":
        raise ValueError(
            f"rope_type must be 'default' or 'yarn'; got {kind!r}. DeepSeek-V2 and V3 "
            "extend their context with YaRN only."
        )
    return RopeConfig(
        rope_theta=theta,
        rope_factor=_field(scaling, "factor"),
        original_seq_len=_field(scaling, "original_max_position_embeddings"),
        beta_fast=scaling.get("beta_fast", 32.0),
        beta_slow=scaling.get("beta_slow", 1.0),
        mscale=scaling.get("mscale", 1.0),
        mscale_all_dim=scaling.get("mscale_all_dim", 0.0),
    )


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
