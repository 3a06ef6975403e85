"""AdamW as DeepSeek-V3 uses it: which weights decay, and in what moments are kept.

Weights and gradients are FP32, and so is every update. Moments may be kept in BF16,
half the bytes (section 3.3.3): they are widened for an update, a stretch of a tensor at
a time, and rounded when they are put back.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import BFloat16, Float32, Shaped
from torch import Tensor, nn
from torch.optim.adamw import adamw

from labkit.config import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter, besides the number of its steps."""

BATCH = 1 << 18
"""Values that an update with BF16 moments widens at a time: few enough for the cache of
a processor."""


class Stretch(NamedTuple):
    """Part of a flat parameter, with what belongs to it."""

    weights: Float32[Tensor, "n"]
    gradients: Float32[Tensor, "n"]
    exp_avg: BFloat16[Tensor, "n"]
    exp_avg_sq: BFloat16[Tensor, "n"]
    step: Float32[Tensor, ""]


class BF16AdamW(torch.optim.AdamW):
    """AdamW that keeps its moments in BF16, and computes with them in FP32.

    An update is the one of `torch.optim.AdamW` for the same moments, bit for bit, and
    uses the new ones before they are rounded: to the nearest number, ties to even, or
    stochastically. Random numbers come from a generator of their own that begins anew
    with each step, so that a step repeats wherever it is done again: in a resumed run,
    after a rollback, on every rank that holds the same weights. That is so on one kind
    of device: a CPU's random numbers are not a GPU's, on which this has not been run.

    Args:
        params: FP32 parameters, or groups of them.
        seed: of stochastic rounding; None rounds to the nearest.
        options: those of `torch.optim.AdamW`, without `amsgrad`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        seed: int | None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(params, **options)
        self.seed = seed
        # PyTorch gives what it loads the dtype of the parameter.
        self.register_load_state_dict_post_hook(_narrow_moments)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        generator = self._generator()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for stretches in _batches(self._stretches(parameters)):
                _update(stretches, group, generator)
            for parameter in parameters:
                self.state[parameter]["step"] += 1

    def _generator(self) -> torch.Generator | None:
        if self.seed is None:
            return None
        first = self.param_groups[0]["params"][0]
        n_steps = int(self.state[first]["step"]) if first in self.state else 0
        mixed = np.random.SeedSequence([self.seed, n_steps]).generate_state(1, "u8")
        return torch.Generator(first.device).manual_seed(int(mixed[0]))

    def _stretches(self, parameters: list[nn.Parameter]) -> Iterator[Stretch]:
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = first_state(parameter, self)
            state = self.state[parameter]
            tensors = (parameter, parameter.grad, *(state[key] for key in MOMENTS))
            flat = (tensor.reshape(-1).split(BATCH) for tensor in tensors)
            for parts in zip(*flat, strict=True):
                yield Stretch(*parts, state["step"])


def _batches(stretches: Iterable[Stretch]) -> Iterator[list[Stretch]]:
    """Yield stretches in turn, of up to `BATCH` values together."""
    batch, n_values = [], 0
    for stretch in stretches:
        n_values += len(stretch.weights)
        if n_values > BATCH:
            yield batch
            batch, n_values = [], len(stretch.weights)
        batch.append(stretch)
    if batch:
        yield batch


def _update(
    stretches: list[Stretch],
    group: dict[str, Any],
    generator: torch.Generator | None,
) -> None:
    weights, gradients, *kept, steps = map(list, zip(*stretches, strict=True))
    narrow = [moment for moments in kept for moment in moments]
    flat = torch.cat(narrow).float()
    wide = flat.split([len(moment) for moment in narrow])
    adamw(
        weights,
        gradients,
        list(wide[: len(weights)]),
        list(wide[len(weights) :]),
        max_exp_avg_sqs=[],
        state_steps=[step.clone() for step in steps],  # it counts them up
        fused=group["fused"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
    if generator is not None:
        round_stochastically(flat, generator)
    for rounded, moment in zip(wide, narrow, strict=True):
        moment.copy_(rounded)


def round_stochastically(x: Float32[Tensor, "n"], generator: torch.Generator) -> None:
    """Round, in place, to one of the BF16 numbers on either side, chosen at random.

    The chance is such that the mean stays what it was. BF16 numbers stay, as do
    infinities, and NaN as arithmetic makes it.

    >>> x = torch.tensor([1 + 2**-9, -3.0]).repeat(1000)
    >>> round_stochastically(x, torch.Generator().manual_seed(0))
    >>> x.unique().tolist()
    [-3.0, 1.0, 1.0078125]
    """
    n_draws = -(-len(x) // 4)  # of 64 bits: cheaper than four of 16
    drawn = torch.empty(n_draws, dtype=torch.int64, device=x.device)
    drawn.random_(-(2**63), None, generator=generator)
    dither = drawn.view(torch.int16)[: len(x)].int().bitwise_and_(0xFFFF)
    # Added to the 16 bits that BF16 lacks, it carries as often as they are large.
    x.view(torch.int32).add_(dither).bitwise_and_(-0x10000)


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over the model's parameters, in FP32 master precision.

    Matrices decay: projections, experts, routers, embedding and head. Norm gains do
    not, because shrinking a gain only rescales what follows it. The report states
    the decay of 0.1 without a list of exceptions, so this choice is ours. Router
    biases are buffers and belong to no optimizer. Its first step makes all moments
    before it changes a weight: where there is no room for them, nothing is changed.

    Raises:
        ValueError: moments in BF16 for parameters that are not in FP32.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim >= 2]
    gains = [p for p in parameters if p.ndim < 2]
    options = {
        "params": _groups(matrices, train.weight_decay) + _groups(gains, 0.0),
        "lr": train.lr,
        "betas": (train.beta1, train.beta2),
        "eps": train.eps,
        "fused": has_fused_adamw(parameters),
    }
    if train.moments == "fp32":
        optimizer = torch.optim.AdamW(**options)
    else:
        _require_fp32(parameters, train.moments)
        is_stochastic = train.moments == "bf16-stochastic"
        optimizer = BF16AdamW(**options, seed=train.seed if is_stochastic else None)
    optimizer.register_step_pre_hook(_begin_moments)
    return optimizer


def _groups(parameters: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Return groups of one decay: one kernel takes tensors of one mesh, or of none."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
        by_mesh.setdefault(mesh, []).append(parameter)
    return [{"params": each, "weight_decay": decay} for each in by_mesh.values()]


def _require_fp32(parameters: list[nn.Parameter], moments: str) -> None:
    dtypes = {parameter.dtype for parameter in parameters} - {torch.float32}
    if dtypes:
        raise ValueError(
            f"moments={moments!r} needs weights in FP32, which they are widened to; "
            f"got {', '.join(sorted(map(str, dtypes)))}. Build the model with "
            "dtype=torch.float32, or set moments='fp32'."
        )


def moment_dtype(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> torch.dtype:
    """Return the dtype in which the optimizer keeps the moments of a parameter."""
    is_narrow = isinstance(optimizer, BF16AdamW)
    return torch.bfloat16 if is_narrow else parameter.dtype


def first_state(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> dict[str, Shaped[Tensor, "..."]]:
    """Return what AdamW keeps for a parameter before its first update."""
    dtype = moment_dtype(parameter, optimizer)
    moments = {key: torch.zeros_like(parameter, dtype=dtype) for key in MOMENTS}
    return {"step": torch.zeros(()), **moments}


def _narrow_moments(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key in MOMENTS:
            state[key] = state[key].bfloat16()


def _begin_moments(
    optimizer: torch.optim.Optimizer,
    args: Any,  # noqa: ANN401, of the step
    kwargs: Any,  # noqa: ANN401
) -> None:
    """Make the moments that the first step needs: all of them, or none."""
    if optimizer.state:
        return
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = first_state(parameter, optimizer)
                state["step"] = state["step"].to(parameter.device)
                optimizer.state[parameter] = state
    except BaseException:
        optimizer.state.clear()
        raise


def has_fused_adamw(parameters: list[nn.Parameter]) -> bool:
    """Return whether one kernel can update these parameters (about 6× faster here).

    Fused AdamW exists on CPU and CUDA, for floating point only. On CUDA this has not
    been run.
    """
    return all(
        p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters
    )
