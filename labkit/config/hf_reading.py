"""From a Hugging Face `config.json` to the fields of a ModelConfig.

Both spellings of the rotary settings are read: `rope_theta` with `rope_scaling`
(as published), and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.config.checks import (
    require_above,
    require_at_least,
    require_choice,
    require_flag,
    require_whole,
)
from labkit.config.parts import MLAConfig, MoEConfig, MTPConfig, RopeConfig

COMMON_DEFAULTS = {
    "n_routed_experts": 0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.006,
    "aux_loss_alpha": 1e-4,
}

DEFAULTS = {
    "deepseek_v2": COMMON_DEFAULTS
    | {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    "deepseek_v3": COMMON_DEFAULTS
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
}
"""By type, what keys stand for that its files may leave out."""

NULL_IS_NONE = (
    "n_routed_experts",
    "n_shared_experts",
    "q_lora_rank",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)
"""Counts whose null says the same as 0."""

ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "partial_rotary_factor": 1.0,
}
"""Keys that change what a model computes, with the only value labkit computes."""

ONLY_OF_EXPERTS = {"moe_layer_freq": 1, "seq_aux": True}

ONLY_OF_ROPE = {
    "attention_factor": None,
    "partial_rotary_factor": 1.0,
    "truncate": True,
}


def read_hf(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelConfig fields that a `config.json` describes.

    Raises:
        ValueError: not a DeepSeek-V2/V3 config, a field missing or unusable, or one
            that asks for what labkit does not compute.
    """
    hf = _settled(_contents(source))
    _require_only(hf, ONLY)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    require_whole(_fields(hf, *sizes, "max_position_embeddings"))
    require_whole(_fields(hf, "n_routed_experts"), at_least=0)
    require_above(_fields(hf, "rms_norm_eps", "initializer_range"), 0)
    extra = _own_key(hf)
    return {
        "vocab_size": hf["vocab_size"],
        "dim": hf["hidden_size"],
        "n_layers": hf["num_hidden_layers"],
        "inter_dim": hf["intermediate_size"],
        "attention": _read_attention(hf),
        "moe": _read_moe(hf) if hf["n_routed_experts"] else None,
        "n_dense_layers": _read_dense_layers(hf, extra),
        "rope": _read_rope(hf, extra),
        "mtp": _read_mtp(hf, extra),
        "max_seq_len": hf["max_position_embeddings"],
        "norm_eps": hf["rms_norm_eps"],
        "init_std": hf["initializer_range"],
    }


def _contents(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if source == "" or not isinstance(source, str | os.PathLike):
        raise ValueError(
            "config must be a config.json, a folder that holds one, or its contents; "
            f"got {source!r}. Give the path of the downloaded model."
        )
    path = Path(source)
    # Unlike the methods of Path, these say no of a name too long for the system.
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.isfile(path):
        raise ValueError(
            f"config must be a config.json or a folder that holds one; found none at "
            f"{path}. Give the path of the downloaded model."
        )
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(
            f"config must be valid JSON; {path} is not ({error}). Download it again."
        ) from error
    if not isinstance(contents, dict):
        raise ValueError(
            f"config must be a JSON object; {path} holds a {type(contents).__name__}. "
            "Download it again."
        )
    return contents


def _settled(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents with defaults in place of what may be left out or null."""
    model_type = contents.get("model_type", "deepseek_v3")
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        raise ValueError(
            f"model_type must be one of {', '.join(DEFAULTS)}; got {model_type!r}. "
            "labkit builds DeepSeek-V2/V3 architectures only."
        )
    hf = DEFAULTS[model_type] | dict(contents)
    return hf | {name: 0 for name in NULL_IS_NONE if name in hf and hf[name] is None}


def _require_only(hf: Mapping[str, Any], only: Mapping[str, object]) -> None:
    """Raise ValueError if a key asks for another computation than labkit's."""
    for key, value in only.items():
        if hf.get(key, value) != value:
            raise ValueError(
                f"{key} must be {json.dumps(value)}, as in every DeepSeek-V2/V3 "
                f"release; got {json.dumps(hf[key], default=repr)}. labkit computes "
                "that form only; load a model that has it."
            )


def _fields(hf: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the named values; ValueError if one is missing or null."""
    for name in names:
        if hf.get(name) is None:
            state = "null" if name in hf else "missing"
            raise ValueError(
                f"config.json must have {name}; it is {state}. Take the file that was "
                "published with the weights."
            )
    return {name: hf[name] for name in names}


def _own_key(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `to_hf` kept because the format has no field for it."""
    extra = hf.get("labkit", {})
    if not isinstance(extra, Mapping):
        raise ValueError(
            f"labkit must be an object, as to_hf writes it; got {extra!r}. "
            "Remove the key to read the model without it."
        )
    return extra


def _read_dense_layers(hf: Mapping[str, Any], extra: Mapping[str, Any]) -> int:
    if not hf["n_routed_experts"]:
        return extra.get("n_dense_layers", hf.get("first_k_dense_replace") or 0)
    first = _fields(hf, "first_k_dense_replace")
    require_whole(first, at_least=0)
    return first["first_k_dense_replace"]


def _read_attention(hf: Mapping[str, Any]) -> MLAConfig:
    widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    require_whole(_fields(hf, "num_attention_heads", *widths))
    require_whole(_fields(hf, "q_lora_rank"), at_least=0)
    n_heads, n_kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads")
    if n_kv_heads not in (None, n_heads):
        raise ValueError(
            "num_key_value_heads must equal num_attention_heads, because the heads of "
            f"MLA share a latent, not keys; got {n_kv_heads!r} and {n_heads}. "
            f"Set num_key_value_heads={n_heads}."
        )
    return MLAConfig(
        n_heads=n_heads,
        q_lora_rank=hf["q_lora_rank"] or None,
        **{name: hf[name] for name in widths},
    )


def _read_moe(hf: Mapping[str, Any]) -> MoEConfig:
    _check_experts(hf)
    method = hf["topk_method"]
    is_grouped = method != "greedy"
    return MoEConfig(
        n_routed_experts=hf["n_routed_experts"],
        n_activated_experts=hf["num_experts_per_tok"],
        moe_inter_dim=hf["moe_intermediate_size"],
        n_shared_experts=hf["n_shared_experts"],
        n_expert_groups=hf["n_group"] if is_grouped else 1,
        n_limited_groups=hf["topk_group"] if is_grouped else 1,
        score_func=hf["scoring_func"],
        group_score="top2" if method == "noaux_tc" else "max",
        has_bias=method == "noaux_tc",
        norm_topk_prob=hf["norm_topk_prob"],
        route_scale=hf["routed_scaling_factor"],
        balance_loss_weight=hf["aux_loss_alpha"],
    )


def _check_experts(hf: Mapping[str, Any]) -> None:
    _require_only(hf, ONLY_OF_EXPERTS)
    require_whole(_fields(hf, "num_experts_per_tok", "moe_intermediate_size"))
    require_whole(_fields(hf, "n_shared_experts"), at_least=0)
    methods = ("greedy", "group_limited_greedy", "noaux_tc")
    require_choice(_fields(hf, "topk_method"), methods)
    if hf["topk_method"] != "greedy":
        require_whole(_fields(hf, "n_group", "topk_group"))
    require_choice(_fields(hf, "scoring_func"), ("sigmoid", "softmax"))
    require_flag(_fields(hf, "norm_topk_prob"))
    require_above(_fields(hf, "routed_scaling_factor"), 0)
    require_at_least(_fields(hf, "aux_loss_alpha"), 0)


def _read_mtp(hf: Mapping[str, Any], extra: Mapping[str, Any]) -> MTPConfig | None:
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    depths = {name: hf[name] for name in names if name in hf}
    require_whole(depths, at_least=0)
    depth = next(iter(depths.values()), 0)
    weight = extra.get("mtp_loss_weight", MTPConfig().loss_weight)
    return MTPConfig(depth=depth, loss_weight=weight) if depth else None


def _read_rope(hf: Mapping[str, Any], extra: Mapping[str, Any]) -> RopeConfig:
    settings = _rope_settings(hf)
    theta = {"rope_theta": settings.get("rope_theta", hf.get("rope_theta", 10_000.0))}
    require_above(theta, 1)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(
            f"rope_type must be 'default' or 'yarn'; got {kind!r}. DeepSeek-V2 and V3 "
            "extend their context with YaRN only."
        )
    _require_only(settings, ONLY_OF_ROPE)
    if kind == "default":
        return replace(_plain_rope(hf, extra), **theta)
    _check_yarn(settings, hf["max_position_embeddings"])
    return RopeConfig(
        **theta,
        rope_factor=settings["factor"],
        original_seq_len=settings["original_max_position_embeddings"],
        beta_fast=settings.get("beta_fast", 32.0),
        beta_slow=settings.get("beta_slow", 1.0),
        mscale=settings.get("mscale", 1.0),
        mscale_all_dim=settings.get("mscale_all_dim", 0.0),
    )


def _rope_settings(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings in whichever spelling the file has them."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(hf.get(name, {}), Mapping | None):
            raise ValueError(
                f"{name} must be an object or null; got {hf[name]!r}. Take the file "
                "that was published with the weights."
            )
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if "type" not in settings and settings.keys() - {"rope_theta"}:
        _fields(settings, "rope_type")
    return settings


def _plain_rope(hf: Mapping[str, Any], extra: Mapping[str, Any]) -> RopeConfig:
    """Return positions without YaRN, or with one that waits for a longer context."""
    fields = extra.get("rope", {"original_seq_len": hf["max_position_embeddings"]})
    try:
        return RopeConfig(**fields)
    except TypeError as error:
        raise ValueError(
            f"labkit.rope must hold fields of RopeConfig, as to_hf writes them; got "
            f"{fields!r}. Remove the key labkit to read the model without it."
        ) from error


def _check_yarn(settings: Mapping[str, Any], max_seq_len: int) -> None:
    require_at_least(_fields(settings, "factor"), 1)
    require_whole(_fields(settings, "original_max_position_embeddings"))
    original = settings["original_max_position_embeddings"]
    if settings["factor"] > 1 and max_seq_len <= original:
        raise ValueError(
            "max_position_embeddings must be above original_max_position_embeddings "
            f"where YaRN extends the context; got {max_seq_len} and {original}. "
            "Set rope_type='default' to stay within the original context."
        )
