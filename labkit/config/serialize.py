"""Configs to plain JSON values and back, for checkpoints and plans."""

from dataclasses import asdict
from typing import Any

from labkit.config.model import ModelConfig
from labkit.config.parts import (
    GQAConfig,
    MLAConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
)


def model_to_dict(cfg: ModelConfig) -> dict[str, Any]:
    """Return the config as plain values, with the kind of its attention named."""
    values = asdict(cfg)
    kind = "mla" if isinstance(cfg.attention, MLAConfig) else "gqa"
    values["attention"] = {"kind": kind, **values["attention"]}
    return values


def model_from_dict(values: dict[str, Any]) -> ModelConfig:
    """Return the config that `model_to_dict` wrote.

    >>> from labkit.config import PRESETS
    >>> model_from_dict(model_to_dict(PRESETS["tiny"])) == PRESETS["tiny"]
    True

    Raises:
        ValueError: fields are missing, unknown or unusable.
    """
    try:
        return _model(values)
    except (KeyError, TypeError) as error:
        raise ValueError(
            "a model must be described by the fields that model_to_dict writes; got "
            f"others ({error}). Write it again with this version of labkit."
        ) from error


def _model(values: dict[str, Any]) -> ModelConfig:
    attention = dict(values["attention"])
    part = {"mla": MLAConfig, "gqa": GQAConfig}[attention.pop("kind")]
    moe, mtp = values["moe"], values["mtp"]
    return ModelConfig(
        **values
        | {
            "attention": part(**attention),
            "moe": None if moe is None else MoEConfig(**moe),
            "rope": RopeConfig(**values["rope"]),
            "mtp": None if mtp is None else MTPConfig(**mtp),
        }
    )
