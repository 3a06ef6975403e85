"""What the notebook on recompute measures: bytes, FLOPs and seconds of policies."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import process_time
from types import MappingProxyType

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from labkit.config import Layout, MLAConfig, ModelConfig
from labkit.memory import MemoryReport, apply_recompute, measure
from labkit.memory.recompute import block_policies
from labkit.memory.stages import stage_layers
from labkit.model import Transformer
from labkit.training.accumulation import LossScale, StepLoss, accumulate
from labkit.training.windows import Batch
from labkit.workbook.timing import fastest

Policies = str | Sequence[str]
"""As `apply_recompute` takes them."""

CONTENTS: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "the residual stream before attention",
        "attn.wq_a": "its normed copy",
        "attn.q_norm": "compressed queries",
        "attn.wq_b": "their normed copy",
        "attn.kv_norm": "the latent and its rotary key",
        "attn.wkv_b": "the latent's normed copy",
        "attn": "queries, keys and values of all heads",
        "attn.wo": "what attention found",
        "ffn_norm": "the residual stream before the experts",
        "ffn.gate": "its normed copy, and whom the router chose",
        "ffn.experts": "gates and ups of the routed experts",
        "ffn.shared_experts": "gate, up and silu of the shared expert",
        "ffn.shared_experts.w2": "their product",
    }
)
"""What the modules of a sparse block keep for the backward pass, in order."""


class RepeatedStep:
    """A training step that can be done again and again: batch and weights stay.

    AdamW works on all its bytes, at a learning rate of 0. So steps under different
    policies do the same work, to the bit.
    """

    def __init__(self, model: Transformer, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, weight_decay=0.0, fused=True
        )
        self()  # the optimizer makes its state in the first step

    def under(self, policies: Policies) -> "RepeatedStep":
        """Put the model under policies, and return the step."""
        apply_recompute(self.model, policies)
        return self

    def backward(self) -> StepLoss:
        """Make the gradients, and change nothing."""
        self.optimizer.zero_grad()
        scale = LossScale(
            n_tokens=self.batch.n_targets, n_sequences=self.batch.n_sequences
        )
        return accumulate(self.model, [self.batch], scale)

    def __call__(self) -> StepLoss:
        """Do the whole step."""
        loss = self.backward()
        self.optimizer.step()
        return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What policies make of a training step; the same on every machine."""

    flops: int
    """Of forward and backward."""

    report: MemoryReport

    @property
    def kept_bytes(self) -> int:
        """What waits for the backward pass as it begins."""
        return kept_bytes(self.report)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, weights and optimizer included."""
        return self.report.peak


def outcome(step: RepeatedStep, policies: Policies) -> Outcome:
    """Return what a step under these policies keeps and computes.

    It is done twice: a counter of FLOPs holds tensors a little longer.
    """
    step.under(policies)
    report = measure(step, step.model, step.optimizer)
    with FlopCounterMode(display=False) as counter:
        step.backward()
    step.optimizer.zero_grad()
    return Outcome(flops=counter.get_total_flops(), report=report)


def forward_flops(step: RepeatedStep) -> int:
    """Return the FLOPs of the forward pass alone."""
    batch = step.batch
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        step.model.loss(batch.tokens, batch.targets)
    return counter.get_total_flops()


def kept_bytes(report: MemoryReport) -> int:
    """Return what waits for the backward pass as it begins, of all parts."""
    parts = ("activations", "logits", "dispatch")
    ends = (x.by_part for x in report.timeline if x.name == "end of forward")
    return max(sum(end.get(part, 0) for part in parts) for end in ends)


def block_bytes(report: MemoryReport, layer: int) -> dict[str, int]:
    """Return what the modules of one layer keep, by their names within it."""
    prefix = f"layers.{layer}."
    found = report.by_module.items()
    return {name.removeprefix(prefix): n for name, n in found if prefix in name}


def seconds_per_step(
    step: RepeatedStep, plans: Mapping[str, Policies], *, n_rounds: int = 5
) -> dict[str, float]:
    """Return the shortest processor time of a step under each of several policies.

    They take turns, see `timing.fastest`. On one thread that is the time which a step
    takes where nothing else runs. Each should have run before, as `outcome` does.
    """

    def run(policies: Policies) -> None:
        step.under(policies)()

    runs = {name: partial(run, policies) for name, policies in plans.items()}
    return fastest(runs, n_rounds=n_rounds, clock=process_time, warms_up=False)


def gradients_and_load(
    step: RepeatedStep, policies: Policies
) -> tuple[list[Shaped[Tensor, "..."]], Int[Tensor, "l e"]]:
    """Return all gradients of a step under policies, and the load of each expert."""
    loss = step.under(policies).backward()
    gradients = [parameter.grad for parameter in step.model.parameters()]
    step.optimizer.zero_grad()
    return gradients, loss.load


def are_equal(
    left: Sequence[Shaped[Tensor, "..."]], right: Sequence[Shaped[Tensor, "..."]]
) -> bool:
    """Return whether all tensors are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def every(k: int, n_blocks: int) -> tuple[str, ...]:
    """Return "full" for the first of every k blocks, and "none" for the others.

    >>> every(4, 6)
    ('full', 'none', 'none', 'none', 'full', 'none')
    """
    return block_policies("every_k", n_blocks, k=k)


def by_stage(cfg: ModelConfig, layout: Layout, policies: Sequence[str]) -> list[str]:
    """Return the policies of each pipeline stage's blocks, counted, as one line each.

    >>> from labkit.config import PRESETS
    >>> policies = ["full", "full", "none", "full", "none"]
    >>> by_stage(PRESETS["tiny"], Layout(pp=2), policies)
    ['2 full, 1 none', '1 full, 1 none']
    """
    lines = []
    for stage in stage_layers(cfg, layout):
        blocks = [index for chunk in stage.chunks for index in chunk.layers]
        if any(chunk.is_last for chunk in stage.chunks):
            blocks += range(cfg.n_layers, cfg.n_layers + cfg.n_mtp)
        counts = Counter(policies[index] for index in blocks)
        lines.append(", ".join(f"{n} {name}" for name, n in counts.most_common()))
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueCost:
    """What it takes to make one kept value of a layer again."""

    name: str
    flops: float
    per_token: int
    """Values of this kind that one token keeps in a layer."""

    is_selective: bool
    """Whether DeepSeek-V3 makes it again (section 3.2.3)."""


def value_costs(cfg: ModelConfig, seq_len: int) -> list[ValueCost]:
    """Return the FLOPs behind each kind of value that a sparse layer keeps.

    A value of a product with a matrix costs two FLOPs for each row of it; one of
    attention's results two for each token it sees, and its share of their scores.

    Args:
        cfg: the model, with latent attention and experts.
        seq_len: tokens of a sequence, whose queries see half of them on average.

    >>> from labkit.config import PRESETS
    >>> costs = value_costs(PRESETS["v3-671b"], 4096)
    >>> [(cost.name, round(cost.flops)) for cost in costs if cost.is_selective]
    [('norms', 4), ('SwiGLU', 5), ('keys, values', 1024), ('queries', 3072)]
    """
    return sorted(_value_costs(cfg, seq_len), key=lambda cost: cost.flops)


def _value_costs(cfg: ModelConfig, seq_len: int) -> Iterator[ValueCost]:
    mla, moe, dim = cfg.attention, cfg.moe, cfg.dim
    assert isinstance(mla, MLAConfig)
    assert moe is not None
    heads, rank = mla.n_heads, mla.q_lora_rank or dim
    hidden = (moe.n_activated_experts + moe.n_shared_experts) * moe.moe_inter_dim
    latents, result = rank + mla.kv_lora_rank, heads * mla.v_head_dim
    seen = (seq_len + 1) / 2
    found = 2 * seen * (1 + mla.qk_head_dim / mla.v_head_dim)
    kinds = (
        ("norms", 4, 2 * dim + latents, True),
        ("SwiGLU", 5, hidden, True),
        ("keys, values", 2 * mla.kv_lora_rank, heads * mla.qk_head_dim + result, True),
        ("queries", 2 * rank, heads * mla.qk_head_dim, True),
        ("latents", 2 * dim, latents + mla.qk_rope_head_dim, False),
        ("gates and ups", 2 * dim, 2 * hidden, False),
        ("what attention found", found, result, False),
    )
    for name, flops, per_token, is_selective in kinds:
        yield ValueCost(
            name=name, flops=flops, per_token=per_token, is_selective=is_selective
        )
