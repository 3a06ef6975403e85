"""What notebook 09 measures: loads of a run, who learns, and a GPU's share of work."""

from collections.abc import Sequence
from functools import lru_cache
from time import process_time
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from labkit.model import Transformer
from labkit.model.experts import Experts
from labkit.model.moe import MoE
from labkit.parallel import Placement
from labkit.training.trainer import Trainer
from labkit.training.windows import Batch
from labkit.workbook.crowd import IDLE, steer
from labkit.workbook.timing import fastest

DIM, INTER_DIM = 256, 128
"""Sizes of the experts whose work is timed: those of `small`."""


class Watched(NamedTuple):
    """What some steps of a run did."""

    loads: Int[Tensor, "t l e"]
    """Tokens of each expert, step by step, over all ranks."""

    losses: list[float]
    """Cross-entropy of the next token, in nats."""

    def busiest(self, n_last: int = 1) -> Float[Tensor, "l"]:
        """Return the busiest expert's load by the mean, over the last steps."""
        load = self.loads[-n_last:].sum(dim=0).double()
        return load.amax(dim=-1) / load.mean(dim=-1)

    def n_idle(self, n_last: int = 1) -> Int[Tensor, "l"]:
        """Return how many experts had less than a tenth of the mean load."""
        return idle(self.loads[-n_last:].sum(dim=0)).sum(dim=-1)

    def steps_to(self, ratio: float, n_mean: int = 10) -> int | None:
        """Return after how many steps no router's busiest exceeds `ratio` any more.

        Loads are summed over `n_mean` steps, so that one odd batch is no relapse.
        None if the last steps still exceed it.
        """
        sums = self.loads.double().unfold(0, n_mean, 1).sum(dim=-1)  # (t, l, e)
        worst = (sums.amax(dim=-1) / sums.mean(dim=-1)).amax(dim=-1)
        above = (worst > ratio).nonzero().flatten().tolist()
        last = above[-1] if above else -1
        return None if last == len(worst) - 1 else last + 1 + n_mean


def watch(trainer: Trainer, n_steps: int) -> Watched:
    """Train, and return what the routers and the loss did."""
    loads, losses = [], []
    for _ in range(n_steps):
        losses.append(trainer.step().loss_main)
        loads.append(trainer.load)
    return Watched(torch.stack(loads), losses)


def idle(load: Int[Tensor, "*l e"]) -> Bool[Tensor, "*l e"]:
    """Return which experts have less than a tenth of the mean load.

    >>> idle(torch.tensor([40, 1, 3])).tolist()
    [False, True, False]
    """
    return load < IDLE * load.double().mean(dim=-1, keepdim=True)


def sparse_layers(model: Transformer) -> list[MoE]:
    """Return the layers with experts, in the order of the rows of a load."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def gradients(model: Transformer, batch: Batch) -> Float[Tensor, "l e"]:
    """Return the largest gradient that each expert gets from a batch, rows by router.

    What stood in the gradients before is gone.
    """
    model.zero_grad(set_to_none=True)
    model.loss(batch.tokens, batch.targets).total.backward()
    found = [
        layer.experts.w13.grad.abs().amax(dim=(1, 2)) for layer in sparse_layers(model)
    ]
    model.zero_grad(set_to_none=True)
    return torch.stack(found)


def skews(model: Transformer, batch: Batch) -> list[float]:
    """Return how much wider the experts' popularity is than one expert's tokens differ.

    Of the logits of affinities: the spread of the experts' means, by the spread over
    tokens around them.
    """
    layers, found = sparse_layers(model), []
    hooks = [
        layer.gate.register_forward_hook(
            lambda gate, args, out: found.append(out[2].logit())
        )
        for layer in layers
    ]
    with torch.no_grad():
        model.loss(batch.tokens, batch.targets)
    for hook in hooks:
        hook.remove()
    return [(x.mean(dim=0).std() / x.std(dim=0).mean()).item() for x in found]


def expert_seconds(
    placement: Placement, load: Int[Tensor, "1 e"], *, n_rounds: int = 5
) -> list[float]:
    """Return the processor time of each GPU's experts, computed here one by one.

    Forward and backward, in FP32 on one thread. All that a GPU's experts do is
    measured, and nothing of the messages between GPUs.
    """
    works = {gpu: work_of(gpu, placement, load) for gpu in range(placement.n_gpus)}
    steps = {gpu: (lambda work=work: compute(*work)) for gpu, work in works.items()}
    seconds = fastest(steps, n_rounds=n_rounds, clock=process_time)
    return [seconds[gpu] for gpu in works]


def work_of(
    gpu: int, placement: Placement, load: Int[Tensor, "1 e"]
) -> tuple[Experts, Float[Tensor, "n d"], Int[Tensor, "n 1"]]:
    """Return a GPU's experts, its tokens, and the slot that each token visits."""
    held = placement.by_gpu[0, gpu]
    shares = (load[0].double() / placement.counts()[0])[held].round().long()
    generator = torch.Generator().manual_seed(gpu)
    experts = Experts(len(held), DIM, INTER_DIM)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    tokens = torch.randn(int(shares.sum()), DIM, generator=generator)
    slots = torch.arange(len(held)).repeat_interleave(shares).unsqueeze(1)
    return experts, tokens, slots


def compute(
    experts: Experts, tokens: Float[Tensor, "n d"], slots: Int[Tensor, "n 1"]
) -> None:
    """Do a forward and a backward pass of a GPU's experts."""
    experts(tokens, torch.ones(slots.shape), slots).square().sum().backward()


@lru_cache
def collapsed_load() -> Int[Tensor, "1 e"]:
    """Return the load of a layer of DeepSeek-V3's size whose router has collapsed."""
    return torch.from_numpy(steer(2.0, 0, 4, n_steps=1).unsteered)[None]


def slowest_by_mean(values: Sequence[float]) -> float:
    """Return the largest value by the mean.

    >>> slowest_by_mean([1, 2, 3])
    1.5
    """
    return max(values) * len(values) / sum(values)


def nodes_per_token(chosen: Bool[np.ndarray, "n e"], placement: Placement) -> float:
    """Return to how many nodes a token goes on average.

    Where an expert lies in several slots, tokens take them in turn.
    """
    n_tokens, n_experts = chosen.shape
    size = placement.experts.shape[1] // placement.n_nodes
    slots = [[] for _ in range(n_experts)]
    for slot, expert in enumerate(placement.experts[0].tolist()):
        slots[expert].append(slot // size)
    most = max(map(len, slots))
    table = np.array([(nodes * most)[:most] for nodes in slots])  # (e, most)
    counts = np.array([len(nodes) for nodes in slots])
    token, expert = chosen.nonzero()
    node = table[expert, token % counts[expert]]
    return len(np.unique(token * placement.n_nodes + node)) / n_tokens
