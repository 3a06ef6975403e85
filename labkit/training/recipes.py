"""Recipes by preset: two that learn on a CPU, and DeepSeek-V3's own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from labkit.config import ModelConfig, TrainConfig
from labkit.config.presets import BYTE_VOCAB

TINY = TrainConfig(
    n_steps=300,
    global_batch=8,
    micro_batch=8,
    seq_len=128,
    lr=6e-3,
    min_lr=6e-4,
    bias_update_rate=1e-2,
)
"""Learns the standard library's bytes within a minute on two cores.

Gamma is ten times the report's: in 300 steps of 0.001 a router bias could hardly
cross the spread of its affinities, and some experts would stay idle.
"""

SMALL = replace(TINY, global_batch=4, micro_batch=4, lr=3e-3, min_lr=3e-4)
"""The same in a minute or two; wider models take a lower rate."""

V3 = TrainConfig(
    n_steps=235_240,
    global_batch=15_360,
    micro_batch=1,
    seq_len=4096,
    lr=2.2e-4,
    min_lr=2.2e-5,
    final_lr=7.3e-6,
    warmup_steps=2000,
    precision="bf16",
)
"""DeepSeek-V3, section 4.2, without the batch ramp of its first 469B tokens.

Steps are 14.8T tokens by 15,360 sequences of 4,096. Products ran in FP8; the
micro-batch is not published.
"""

RECIPES: Mapping[str, TrainConfig] = MappingProxyType(
    {"tiny": TINY, "small": SMALL, "v3-671b": V3}
)

MOST_SEQUENCES = 2**16
"""A step of more would fill the memory with tokens; DeepSeek-V3's has 15,360."""


def require_fit(cfg: ModelConfig, train: TrainConfig) -> None:
    """Raise ValueError unless the model takes byte tokens in the recipe's amounts."""
    if train.global_batch > MOST_SEQUENCES:
        raise ValueError(
            f"global_batch must be at most {MOST_SEQUENCES:,}, because a step holds "
            f"all its tokens; got {train.global_batch:,}. Set global_batch=64 or so."
        )
    if train.seq_len > cfg.max_seq_len:
        raise ValueError(
            "seq_len must be at most the model's max_seq_len; got "
            f"{train.seq_len} and {cfg.max_seq_len}. Set seq_len={cfg.max_seq_len}, "
            "or build the model for longer sequences."
        )
    if train.seq_len <= cfg.n_mtp:
        raise ValueError(
            "seq_len must exceed the MTP depth, because module k predicts k tokens "
            f"further ahead; got {train.seq_len} and {cfg.n_mtp}. "
            f"Set seq_len={cfg.n_mtp + 1} or more, or build the model without MTP."
        )
    if cfg.vocab_size < BYTE_VOCAB:
        raise ValueError(
            f"vocab_size must be at least {BYTE_VOCAB}, because tokens are bytes; got "
            f"{cfg.vocab_size}. Set vocab_size={BYTE_VOCAB}."
        )


def require_run(n_steps: int, save_every: int | None, run_dir: Path | None) -> None:
    """Raise ValueError unless so many steps can be done, and saved so often."""
    if n_steps < 0:
        raise ValueError(
            f"n_steps must not be negative; got {n_steps}. "
            "Set n_steps=None to go on to the end of the recipe."
        )
    if save_every is not None and (save_every < 1 or run_dir is None):
        raise ValueError(
            "save_every needs a run_dir and at least 1 step; got "
            f"save_every={save_every} and run_dir={run_dir}. "
            "Give the Trainer a run_dir, or set save_every=None."
        )
