"""Recipes by preset: two that learn on a CPU, and DeepSeek-V3's own."""

from collections.abc import Mapping
from types import MappingProxyType

from labkit.config import TrainConfig

TINY = TrainConfig()

SMALL = TrainConfig()

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
