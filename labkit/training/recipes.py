"""Recipes by preset: two that learn on a CPU, and DeepSeek-V3's own."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from labkit.config import TrainConfig

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
