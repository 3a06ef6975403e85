"""What a training step of a mixture of experts takes: computing, sending, waiting.

Alpha-beta arithmetic on a described cluster, for one rank of a layout. Links are alone
with their traffic, and loads are even but for `imbalance`. Computation runs at the rate
of one published profile, and at the same share of BF16's data sheet on other cards.
None of it has been timed on a cluster here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from labkit.config import PRESETS, Layout, ModelConfig
from labkit.hardware import accelerator
from labkit.memory.shards import Shards, shard_params
from labkit.memory.stages import stage_layers
from labkit.parallel.communication import (
    Cluster,
    all_gather,
    all_reduce,
    cluster,
    expert_dispatch,
    reduce_scatter,
    send,
)
from labkit.parallel.pipeline import Times, published_bubble

PROFILED_SECONDS = 124.3e-3
"""Computing of four sparse layers of DeepSeek-V3, forward and backward of 4,096 tokens
on an H800: the busy time of train.json in github.com/deepseek-ai/profile-data."""

PROFILED_LAYERS, PROFILED_TOKENS = 4, 4096

FP8_ROW = 1 + 4 / 128
"""Bytes of a value in FP8, with an FP32 scale for each 128."""

ROW_BYTES: Mapping[str, float] = MappingProxyType(
    {"FP32": 4, "BF16": 2, "FP8": FP8_ROW}
)
"""Bytes of a value of a token on its way, by the name of the format."""


class Parts(NamedTuple):
    """Seconds of a step, one after another, as far as nothing hides them."""

    computing: float
    tensor: float
    """Messages of tensor parallelism."""

    experts: float
    """Tokens on their way to experts and back."""

    gradients: float
    """Gradients summed over ranks, and weights gathered again."""

    pipeline: float
    """Waiting for other stages, and sending to them."""

    imbalance: float
    """Waiting for the rank whose experts have most to do."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)

    @property
    def communication_share(self) -> float:
        """What messages take of the step."""
        return (self.tensor + self.experts + self.gradients) / self.total


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model on a cluster, and how it communicates.

    >>> parts = Run(layout=Layout(pp=16, dp=128, ep=64)).parts
    >>> round(parts.total, 1), f"{parts.communication_share:.0%}"
    (23.3, '28%')
    """

    model: str = "v3-671b"
    card: str = "h800"
    layout: Layout = field(default_factory=Layout)
    n_sequences: int = 15_360
    """Of a step; DeepSeek-V3's at the end of its ramp."""

    seq_len: int = 4096
    there: str = "FP8"
    """Format of tokens on their way to experts, and of their gradients."""

    back: str = "BF16"
    """Format of what comes back."""

    is_deduplicated: bool = True
    """Whether a node gets a token once, and not once for each of its experts."""

    gradient_bytes: float = 4
    """Of a value in the messages that sum gradients."""

    is_hierarchical: bool = False
    """Whether gradients are summed inside nodes first."""

    overlap: float = 0.0
    """Share of the experts' and gradients' messages that computation could hide."""

    schedule: str = "1f1b"
    """Of the pipeline; one of `labkit.parallel.pipeline.published.PUBLISHED`."""

    imbalance: float = 1.0
    """Load of the fullest rank's experts, by the mean."""

    @property
    def cfg(self) -> ModelConfig:
        return PRESETS[self.model]

    @property
    def n_micro_batches(self) -> float:
        """Sequences that each rank works on in turn."""
        return self.n_sequences / self.layout.dp

    @property
    def layers(self) -> float:
        """Layers of a rank, in the mean."""
        return self.cfg.n_layers / self.layout.pp

    @cached_property
    def layer_seconds(self) -> float:
        """Computing of one layer for one sequence, forward and backward."""
        n_flops = self.cfg.flops_per_token(self.seq_len, causal=True, training=True)
        each = n_flops * self.seq_len / self.cfg.n_layers / self.layout.tp
        return each / rate_of(self.card)

    @cached_property
    def tensor_seconds(self) -> float:
        """Messages of tensor parallelism of one layer and sequence.

        Attention and the network after it each gather the sequence and scatter their
        sums, forward and backward: as much as four all-reduces.
        """
        if self.layout.tp == 1:
            return 0.0
        ranks = cluster(self.card, self.layout.tp)
        return 4 * all_reduce(ranks, self.seq_len * self.cfg.dim * 2).seconds

    @cached_property
    def expert_seconds(self) -> float:
        """Tokens on their way to experts and back, of one layer and sequence.

        Forward as `there` and `back`; the gradients go the same ways in the backward.
        """
        if self.layout.ep == 1 or self.cfg.moe is None:
            return 0.0
        ranks = cluster(self.card, self.layout.ep)
        ways = (
            expert_dispatch(
                ranks,
                self.cfg.moe,
                n_tokens=max(self.seq_len // self.layout.tp, 1),
                token_bytes=self.cfg.dim * ROW_BYTES[name],
                deduplicate=self.is_deduplicated,
            ).seconds
            for name in (self.there, self.back)
        )
        share = self.cfg.n_moe_layers / self.cfg.n_layers
        return 2 * sum(ways) * share * self.imbalance

    @cached_property
    def gradient_seconds(self) -> float:
        """Gradients summed over the ranks that hold the same weights, once a step.

        Each rank then updates its part, and gathers the others' weights in BF16.
        """
        shards = self._shards
        dense = shards.split.n_params + shards.replicated.n_params
        return sum(
            self._sum_seconds(n_params, n_ranks)
            for n_params, n_ranks in (
                (dense, self.layout.dp),
                (shards.expert.n_params, shards.expert.n_holders),
            )
        )

    @property
    def _shards(self) -> Shards:
        """What a rank of a stage in the middle holds."""
        stages = stage_layers(self.cfg, self.layout)
        return shard_params(self.cfg, self.layout, stages[len(stages) // 2])

    def _sum_seconds(self, n_params: int, n_ranks: int) -> float:
        if n_ranks == 1:
            return 0.0
        ranks = self._spread(n_ranks)
        algorithm = "hierarchical" if self.is_hierarchical else "ring"
        summed = reduce_scatter(
            ranks, n_params * self.gradient_bytes, algorithm=algorithm
        )
        gathered = all_gather(ranks, n_params * 2, algorithm=algorithm)
        return summed.seconds + gathered.seconds

    def _spread(self, n_ranks: int) -> Cluster:
        """Return the GPUs of a group whose neighbours have other parts of a model."""
        whole = cluster(self.card, 8)
        apart = self.layout.dp * self.layout.tp // n_ranks
        per_node = min(max(whole.gpus_per_node // apart, 1), n_ranks)
        return Cluster(
            link=whole.link,
            network=whole.network,
            n_nodes=n_ranks // per_node,
            gpus_per_node=per_node,
        )

    @cached_property
    def parts(self) -> Parts:
        """Seconds of a step."""
        n = self.n_micro_batches * self.layers
        computing = n * self.layer_seconds
        experts, hidden = self._hide(n * self.expert_seconds, computing)
        gradients, _ = self._hide(self.gradient_seconds, computing - hidden)
        return Parts(
            computing=computing,
            tensor=n * self.tensor_seconds,
            experts=experts,
            gradients=gradients,
            pipeline=self._pipeline_seconds(experts / n),
            imbalance=(self.imbalance - 1) * self._expert_flops_share * computing,
        )

    def _hide(self, seconds: float, room: float) -> tuple[float, float]:
        """Return what of messages is left to wait for, and what is hidden."""
        hidden = min(self.overlap * seconds, room)
        return seconds - hidden, hidden

    def _pipeline_seconds(self, exposed: float) -> float:
        """Return the bubble; sends between stages go on while ranks compute."""
        if self.layout.pp == 1:
            return 0.0
        sent = (self.tensor_seconds + exposed) / 2
        forward, weights = self.layer_seconds / 3, self.layer_seconds / 3
        times = Times(
            f=self.layers * (forward + sent),
            b=self.layers * (2 * forward + sent),
            w=self.layers * weights,
        )
        nodes = cluster(self.card, 16)
        n_bytes = self.seq_len // self.layout.tp * self.cfg.dim * 2
        hops = (
            2 * (self.layout.pp - 1) * send(nodes, n_bytes, between_nodes=True).seconds
        )
        return published_bubble(self.schedule, self.layout.pp, times) + hops

    @property
    def _expert_flops_share(self) -> float:
        moe = self.cfg.moe
        if moe is None:
            return 0.0
        each = 3 * 2 * 3 * self.cfg.dim * moe.moe_inter_dim * moe.n_activated_experts
        n_flops = self.cfg.flops_per_token(self.seq_len, causal=True, training=True)
        return each * self.cfg.n_moe_layers / n_flops


def rate_of(card: str) -> float:
    """Return the FLOP/s at which a card computes a training step.

    >>> f"{rate_of('h800') / 1e12:.0f} TFLOP/s"
    '541 TFLOP/s'
    """
    cfg = PRESETS["v3-671b"]
    n_flops = cfg.flops_per_token(PROFILED_TOKENS, causal=True, training=True)
    of_layers = n_flops * PROFILED_TOKENS * PROFILED_LAYERS / cfg.n_layers
    share = of_layers / PROFILED_SECONDS / accelerator("h800").flops("bfloat16")
    return share * accelerator(card).flops("bfloat16")
