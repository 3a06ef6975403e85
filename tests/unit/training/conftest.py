"""A model of a few thousand parameters, and texts small enough to check by hand."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from labkit.config import MLAConfig, ModelConfig, MoEConfig, MTPConfig, TrainConfig
from labkit.model import Transformer
from labkit.training import Corpus

MICRO = ModelConfig(
    vocab_size=256,
    dim=16,
    n_layers=2,
    inter_dim=24,
    attention=MLAConfig(
        n_heads=2,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    moe=MoEConfig(n_routed_experts=4, n_activated_experts=2, moe_inter_dim=8),
    mtp=MTPConfig(),
    max_seq_len=64,
    init_std=0.05,
)

TRAIN = TrainConfig(
    n_steps=20, global_batch=4, micro_batch=2, seq_len=16, lr=1e-2, warmup_steps=2
)


@pytest.fixture
def micro_config() -> ModelConfig:
    return MICRO


@pytest.fixture
def train_config() -> TrainConfig:
    return TRAIN


@pytest.fixture
def make_model() -> Callable[[], Transformer]:
    def make() -> Transformer:
        return Transformer(MICRO, generator=torch.Generator().manual_seed(0))

    return make


@pytest.fixture
def corpus() -> Corpus:
    """A thousand bytes of a sentence that repeats."""
    text = b"the quick brown fox jumps over the lazy dog; " * 24
    tokens = np.frombuffer(text, dtype=np.uint8)
    return Corpus("a sentence", tokens[:900], tokens[900:], fingerprint="sentence")


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Six short documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(6):
        (folder / f"{index}.txt").write_text(f"document {index}\n" * 20)
    return folder
