"""Layers in their full size, measured without their bytes, and predicted.

A pipeline stage of DeepSeek-V3 takes tens of gigabytes. On fake tensors its operators
run as on a CPU and compute nothing but shapes, so that `measure` sees every storage of
a step on any machine: activations, gradients and what lives between.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.config.checks import require_whole
from labkit.memory.fakes import faked
from labkit.memory.measure import measure
from labkit.memory.persistent import States
from labkit.memory.predict import predict
from labkit.memory.report import MemoryReport
from labkit.model import Transformer

BF16 = States(weights="bfloat16", gradients="bfloat16", moments="bfloat16")
"""Of a stage whose optimizer is left out."""


def local_experts(cfg: ModelConfig, ep: int) -> ModelConfig:
    """Return the model with the experts of one of `ep` ranks, and no balance loss.

    Tokens choose as many of them as of all: what other ranks would send is as much
    as what would leave.

    >>> from labkit.config import PRESETS
    >>> local_experts(PRESETS["v3-671b"], 8).moe.n_routed_experts
    32
    """
    require_whole({"ep": ep})
    moe = cfg.moe
    if moe is None or moe.n_routed_experts % ep:
        n_experts = 0 if moe is None else moe.n_routed_experts
        raise ValueError(
            f"ep must divide n_routed_experts; got ep={ep} and {n_experts}. "
            "Take a model with experts, and a divisor of their number."
        )
    fewer = replace(
        moe,
        n_routed_experts=moe.n_routed_experts // ep,
        n_expert_groups=1,
        n_limited_groups=1,
        balance_loss_weight=0.0,
    )
    return replace(cfg, moe=fewer)


def measure_stage(
    cfg: ModelConfig,
    train: TrainConfig,
    n_layers: int,
    *,
    change: Callable[[Transformer], object] | None = None,
) -> MemoryReport:
    """Return what a forward and backward pass of BF16 layers takes, on fake tensors.

    The layers stand in the middle of a pipeline: without embedding, head or optimizer.
    Those of a model with experts all have them. Nothing is computed, so tokens are
    routed as evenly as `predict` assumes.

    Args:
        cfg: the model, whose layers these are.
        train: its micro-batch and sequence.
        n_layers: of the stage.
        change: what is done to a model of these layers before, such as a policy of
            recomputation or a conversion to FP8.
    """
    require_whole({"n_layers": n_layers})
    alone = _only(cfg, n_layers)
    model = Transformer(alone, device="meta", dtype=torch.bfloat16)
    if change is not None:
        change(model)
    stage = _Stage(model, train)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return measure(_step_of(faked(stage)), stage)


def _only(cfg: ModelConfig, n_layers: int) -> ModelConfig:
    """Return the model with so many layers, all with experts if it has any."""
    n_dense = 0 if cfg.moe is not None else n_layers
    return replace(cfg, n_layers=n_layers, n_dense_layers=n_dense, mtp=None)


def predict_stage(
    cfg: ModelConfig,
    train: TrainConfig,
    n_layers: int,
    *,
    recompute: str = "none",
    cached: Mapping[str, str] | None = None,
) -> MemoryReport:
    """Return what `predict` says of the same layers and pass.

    They are the middle one of three stages. What the optimizer holds is counted, and
    `measure_stage` has none: compare activations, weights and gradients.

    Args:
        cfg: the model, whose layers these are.
        train: its micro-batch and sequence.
        n_layers: of the stage.
        recompute: the policy of its layers.
        cached: formats of those in FP8, the first of which is `layers.0`.
    """
    require_whole({"n_layers": n_layers})
    reports = predict(
        _only(cfg, n_layers + 2),
        replace(train, global_batch=train.micro_batch),
        Layout(pp=3),
        states=BF16,
        layers_per_stage=(1, n_layers, 1),
        recompute=recompute,
        cached=dict(map(_one_further, cached.items())) if cached else "compute",
    )
    return reports.by_stage[1]


def _one_further(item: tuple[str, str]) -> tuple[str, str]:
    """Return a format by the name of its layer in the three stages."""
    kind, number, part = item[0].split(".", 2)
    return f"{kind}.{int(number) + 1}.{part}", item[1]


class _Stage(nn.Module):
    """Layers of a model, and what the stage before sends them."""

    def __init__(self, model: Transformer, train: TrainConfig) -> None:
        super().__init__()
        self.shape = train.micro_batch, train.seq_len, model.cfg.dim
        self.n_pairs = model.cfg.attention.rope_dim // 2
        self.layers = model.layers

    def forward(self) -> torch.Tensor:
        x = torch.empty(self.shape, dtype=torch.bfloat16).requires_grad_()
        turns = torch.empty(self.shape[1], self.n_pairs, dtype=torch.complex64)
        for layer in self.layers:
            x, _ = layer(x, turns)
        return x


def _step_of(stage: _Stage) -> Callable[[], None]:
    def step() -> None:
        # The result is sent on, and not kept here.
        result = get_gradient_edge(stage())
        gradient = torch.empty(stage.shape, dtype=torch.bfloat16)
        torch.autograd.backward(result, gradient)

    return step
