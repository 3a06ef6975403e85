"""One process as the measure of many: drawn models, and three steps of training.

A case is a model of odd sizes with its batches; `serial_steps` trains it in this
process, `parallel_steps` anything that works like `labkit.parallel.Parallel`, and
`compare` says how far the two are apart. Sizes come from seeds, so that all ranks, and
all runs of the tests, draw the same.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from labkit.config import (
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    TrainConfig,
)
from labkit.model import Transformer
from labkit.model.transformer import LossParts
from labkit.training.optimizer import build_optimizer

N_STEPS = 3

TRAIN = TrainConfig(lr=1e-3, min_lr=1e-4, eps=1e-5, grad_clip=0.5)
"""An epsilon well above the rounding error of gradients, which AdamW would enlarge."""

BIAS_RATE = 0.01

IGNORED = -100

PARTS = ("total", "main", "mtp", "balance")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to train, and the batches of its optimizer steps."""

    cfg: ModelConfig
    seed: int = 0
    n_sequences: int = 8
    seq_len: int = 11
    train: TrainConfig = TRAIN

    def model(self, dtype: torch.dtype | None = None) -> Transformer:
        """Return the model with the weights it begins with, the same everywhere."""
        generator = torch.Generator().manual_seed(self.seed)
        return Transformer(self.cfg, dtype=dtype, generator=generator)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets of a step: all sequences, some targets ignored."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        shape = (self.n_sequences, self.seq_len + 1)
        text = torch.randint(self.cfg.vocab_size, shape, generator=generator)
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        is_ignored = torch.rand(targets.shape, generator=generator) < 0.1
        return tokens, targets.masked_fill(is_ignored, IGNORED)

    def share(self, step: int, index: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequences of one of `n` data-parallel ranks."""
        tokens, targets = self.batch(step)
        return tokens.chunk(n)[index], targets.chunk(n)[index]

    def counts(self, step: int) -> dict[str, int]:
        """Return what the loss of the whole step is normalised by."""
        _, targets = self.batch(step)
        n_tokens = int((targets != IGNORED).sum())
        return {"n_tokens": n_tokens, "n_sequences": len(targets)}


def drawn(seed: int, *, n_layers: int = 3, n_experts: int = 6, **other: int) -> Case:
    """Return a case of odd sizes: MLA, experts, a module of MTP.

    Widths are multiples of nothing but what heads need; 4 heads, so that tp up to 4
    cuts them; hidden units in fours for the same reason.

    Args:
        seed: draws the sizes, the weights and the text.
        n_layers: main layers, the first of them dense.
        n_experts: routed experts.
        other: fields of `Case`.
    """
    draw = random.Random(seed)
    odd = [n for n in range(17, 40, 2)]
    dim = draw.choice(odd)
    cfg = ModelConfig(
        vocab_size=draw.choice([53, 59, 61, 67]),
        dim=dim,
        n_layers=n_layers,
        inter_dim=4 * draw.choice([7, 9, 11]),
        attention=MLAConfig(
            n_heads=4,
            q_lora_rank=draw.choice([None, 9, 13]),
            kv_lora_rank=draw.choice([7, 11]),
            qk_nope_head_dim=draw.choice([5, 7]),
            qk_rope_head_dim=draw.choice([2, 6]),
            v_head_dim=draw.choice([3, 5]),
        ),
        moe=MoEConfig(
            n_routed_experts=n_experts,
            n_activated_experts=2,
            moe_inter_dim=4 * draw.choice([3, 5]),
            route_scale=1.5,
            balance_loss_weight=0.05,
        ),
        mtp=MTPConfig(),
        max_seq_len=64,
        init_std=0.1,
    )
    return Case(cfg=cfg, seed=seed, **other)


def for_bf16(case: Case) -> Case:
    """Return the case with tokens that visit all experts.

    Rounding to BF16 decides many near-ties between experts, and one token that goes
    elsewhere changes gradients by more than all rounding together.
    """
    moe = replace(case.cfg.moe, n_activated_experts=case.cfg.moe.n_routed_experts)
    return replace(case, cfg=replace(case.cfg, moe=moe))


def dense(case: Case) -> Case:
    """Return the case with neither experts nor MTP, and grouped-query attention."""
    attention = GQAConfig(n_heads=4, n_kv_heads=2, head_dim=6)
    cfg = replace(case.cfg, moe=None, mtp=None, attention=attention)
    return replace(case, cfg=cfg)


@dataclass
class Step:
    """What one step of training gave; gradients are those before clipping."""

    parts: dict[str, float]
    load: torch.Tensor
    norm: float
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    """After AdamW, and the routers' biases after their update."""


class Narrow(nn.Module):
    """A model whose loss is computed with weights rounded to BF16."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs) -> LossParts:
        return self.model.loss(*args, **kwargs)

    def loss(self, *args, **kwargs) -> LossParts:
        rounded = {
            f"model.{name}": parameter.bfloat16()
            for name, parameter in self.model.named_parameters()
        }
        return torch.func.functional_call(self, rounded, args, kwargs)


def serial_steps(
    case: Case, *, is_bf16: bool = False, beside: list[Step] | None = None
) -> list[Step]:
    """Return what training gives in one process, each batch as a whole.

    Args:
        case: what to train.
        is_bf16: compute in BF16, with FP32 weights, gradients and moments beside it.
        beside: another run, whose weights each step begins with. AdamW enlarges the
            rounding of small gradients, and BF16 that of weights, so that two runs in
            BF16 drift apart, rightly.
    """
    model = case.model()
    optimizer = build_optimizer(model, case.train)
    computed = Narrow(model) if is_bf16 else model
    steps = []
    for index in range(N_STEPS):
        if beside and index:
            model.load_state_dict(beside[index - 1].parameters)
        parts = computed.loss(*case.batch(index), **case.counts(index))
        parts.total.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        model.update_router_bias(parts.load, BIAS_RATE)
        steps.append(
            Step(
                parts={name: getattr(parts, name).item() for name in PARTS},
                load=parts.load,
                norm=norm.item(),
                gradients=gradients,
                parameters={n: p.clone() for n, p in model.state_dict().items()},
            )
        )
    return steps


def parallel_steps(
    case: Case, run: object, *, index: int, n: int, n_micro_batches: int = 1
) -> list[Step]:
    """Return what training gives on many ranks, of which this is one.

    Args:
        case: what to train.
        run: what `labkit.parallel.model` returned.
        index: which share of the sequences is this rank's.
        n: shares.
        n_micro_batches: of a step on each rank.
    """
    optimizer = build_optimizer(run, case.train)
    steps = []
    for step in range(N_STEPS):
        parts = run.step(
            *case.share(step, index, n),
            **case.counts(step),
            n_micro_batches=n_micro_batches,
        )
        gradients = {n: g.clone() for n, g in run.full_gradients().items()}
        norm = run.clip_gradients(case.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        run.update_router_bias(parts.load, BIAS_RATE)
        steps.append(
            Step(
                parts={name: float(getattr(parts, name)) for name in PARTS},
                load=parts.load,
                norm=float(norm),
                gradients=gradients,
                parameters={n: p.clone() for n, p in run.full_tensors().items()},
            )
        )
    return steps


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the serial tensor that a parameter, or a gradient, is a cut of."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all gradients as the serial model has them; every rank calls it."""
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest of `theirs`."""
    ours, theirs = ours.double(), theirs.double()
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    scale = theirs.abs().max().item() or 1.0
    return (ours - theirs).abs().max().item() / scale


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of `theirs`."""
    ours, theirs = ours.double(), theirs.double()
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return ((ours - theirs).norm() / (theirs.norm().item() or 1.0)).item()


Measure = Callable[[torch.Tensor, torch.Tensor], float]


def worst(
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    measure: Measure = error,
) -> tuple[float, str]:
    """Return the largest error of all tensors, and whose it is; NaN is the largest."""
    assert sorted(ours) == sorted(theirs), sorted(set(ours) ^ set(theirs))
    errors = [(measure(ours[name], theirs[name]), name) for name in theirs]
    return max(errors, key=lambda each: (each[0] != each[0], each[0]))


@dataclass
class Comparison:
    """How far a run is from the serial one: the worst of all steps."""

    loss: float
    norm: float
    gradient: float
    where_gradient: str
    parameter: float
    where_parameter: str
    n_loads_apart: int
    """(Token, choice) pairs of all steps that went to another expert."""


def compare(
    ours: list[Step], theirs: list[Step], measure: Measure = error
) -> Comparison:
    """Return how far apart two runs are, over all their steps."""
    assert len(ours) == len(theirs) == N_STEPS
    pairs = list(zip(ours, theirs, strict=True))
    gradients = [worst(a.gradients, b.gradients, measure) for a, b in pairs]
    parameters = [worst(a.parameters, b.parameters, measure) for a, b in pairs]
    gradient, parameter = max(gradients), max(parameters)
    losses = [
        abs(a.parts[part] - b.parts[part]) / max(abs(b.parts[part]), 1e-3)
        for a, b in pairs
        for part in PARTS
    ]
    return Comparison(
        loss=max(losses),
        norm=max(abs(a.norm - b.norm) / b.norm for a, b in pairs),
        gradient=gradient[0],
        where_gradient=gradient[1],
        parameter=parameter[0],
        where_parameter=parameter[1],
        n_loads_apart=sum(int((a.load - b.load).abs().sum()) // 2 for a, b in pairs),
    )


@dataclass
class Rounding:
    """How far BF16 takes whole gradients, by their norm: the worst of all steps."""

    loss: float
    gradient: float
    """From one process in BF16."""

    ours: float
    """From FP32."""

    theirs: float
    """One process in BF16, from FP32."""


def rounding(case: Case, ours: list[Step]) -> Rounding:
    """Return how far a run in BF16 is from one process, in BF16 and in FP32.

    Gradients of single gains say nothing here: of one process in BF16 they are as far
    from FP32 as 4 percent.
    """
    narrow = serial_steps(case, is_bf16=True, beside=ours)
    exact = serial_steps(case, beside=ours)
    steps = list(zip(ours, narrow, exact, strict=True))
    flat = [tuple(map(_flat_gradient, each)) for each in steps]
    losses = [(a.parts["total"], b.parts["total"]) for a, b, _ in steps]
    return Rounding(
        loss=max(abs(a - b) / b for a, b in losses),
        gradient=max(distance(a, b) for a, b, _ in flat),
        ours=max(distance(a, c) for a, _, c in flat),
        theirs=max(distance(b, c) for _, b, c in flat),
    )


def _flat_gradient(step: Step) -> torch.Tensor:
    return torch.cat(
        [step.gradients[name].flatten() for name in sorted(step.gradients)]
    )
