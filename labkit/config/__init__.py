"""What a model, a run and a layout are, and the numbers that follow from them."""

from labkit.config.counts import CACHE_DTYPE_BYTES, ParameterCounts
from labkit.config.layout import Layout
from labkit.config.model import ModelConfig
from labkit.config.parts import (
    AttentionConfig,
    GQAConfig,
    MLAConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
)
from labkit.config.presets import PRESETS
from labkit.config.serialize import model_from_dict, model_to_dict
from labkit.config.train import TrainConfig

__all__ = [
    "CACHE_DTYPE_BYTES",
    "PRESETS",
    "AttentionConfig",
    "GQAConfig",
    "Layout",
    "MLAConfig",
    "MTPConfig",
    "MoEConfig",
    "ModelConfig",
    "ParameterCounts",
    "RopeConfig",
    "TrainConfig",
    "model_from_dict",
    "model_to_dict",
]
