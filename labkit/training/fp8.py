"""FP8 as a recipe asks for it: which layers of a model, and what multiplies there.

A `PrecisionScheduler` changes which they are, step by step, within the same policy.

None of this has been run on a GPU.
"""

from collections.abc import Callable

import torch

from labkit.config import TrainConfig
from labkit.config.checks import require_choice, require_instance
from labkit.model import Transformer
from labkit.model.experts import Experts
from labkit.model.linear import Linear
from labkit.precision import POLICIES, choose_backend, convert
from labkit.precision.levels import modules_in_fp8, set_levels
from labkit.precision.linear import InFp8
from labkit.precision.scheduler import PrecisionScheduler


class Fp8:
    """Keeps a model in FP8 as its recipe says; one without FP8 stays as it is.

    Args:
        model: in high precision. What a caller had converted would not be in a
            checkpoint, and a resumed run would be another one: it is refused.
        train: the recipe.
        scheduler: decides which layers of the recipe's policy are in FP8; None: all.
    """

    def __init__(
        self,
        model: Transformer,
        train: TrainConfig,
        scheduler: PrecisionScheduler | None = None,
    ) -> None:
        require_choice({"fp8_policy": train.fp8_policy}, tuple(POLICIES))
        _require_high(model)
        if scheduler is not None:
            require_instance({"scheduler": scheduler}, PrecisionScheduler)
            _require_aim(scheduler, train)
            _require_modules(scheduler, model)
        self.model, self.train, self.scheduler = model, train, scheduler
        self.apply()

    @property
    def is_on(self) -> bool:
        return self.train.precision == "fp8"

    def apply(self) -> None:
        """Convert the model by the recipe's policy, or to the scheduler's levels."""
        if self.scheduler is not None:
            set_levels(
                self.model,
                self.scheduler.levels,
                policy=self.scheduler.aim,
                hardware=self.scheduler.hardware,
            )
        elif self.is_on:
            hardware = hardware_of(next(self.model.parameters()).device)
            convert(self.model, self.train.fp8_policy, hardware=hardware)

    def transform(self, change: Callable[[Transformer], object]) -> None:
        """Change the model in high precision, as transforms that come before FP8 do."""
        if self.is_on:
            convert(self.model, "bf16")
        try:
            change(self.model)
        finally:
            self.apply()

    def __str__(self) -> str:
        layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, Linear | Experts)
        }
        in_fp8 = {n: layer for n, layer in layers.items() if isinstance(layer, InFp8)}
        policy, n = self.train.fp8_policy, f"{len(in_fp8) or 'none'} of {len(layers)}"
        by = f"by {policy}"
        if self.scheduler is not None:
            by = f"as a scheduler decides, up to {policy}"
        if not in_fp8:
            return f"{n} layers in FP8 {by}"
        parts = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in in_fp8))
        return (
            f"{n} layers in FP8 ({parts}) {by}, {_means(next(iter(in_fp8.values())))}"
        )


def hardware_of(device: torch.device) -> str:
    """Return whose plan holds for training on a device: a Hopper card's, or a CPU's.

    Raises:
        ValueError: a GPU with FP8 units that cannot multiply tiles of 128 as it is.
    """
    return "h800" if choose_backend(device).name == "hopper" else "cpu"


def _require_high(model: Transformer) -> None:
    found = [name for name, part in model.named_modules() if isinstance(part, InFp8)]
    if found:
        raise ValueError(
            "model must be in high precision, because a Trainer converts it as its "
            f"recipe says; got {found[0]} in FP8. Take it back with "
            "convert(model, 'bf16'), and set precision='fp8' and fp8_policy."
        )


def _require_aim(scheduler: PrecisionScheduler, train: TrainConfig) -> None:
    if train.precision != "fp8":
        raise ValueError(
            "a precision scheduler decides what is in FP8, so precision must be 'fp8'; "
            f"got {train.precision!r}. Set precision='fp8', or scheduler=None."
        )
    theirs, ours = scheduler.aim.name, train.fp8_policy
    if scheduler.aim != POLICIES[ours]:
        raise ValueError(
            "the scheduler's aim must be the recipe's fp8_policy, which checkpoints "
            f"record; got {theirs!r} and {ours!r}. Give the scheduler aim={ours!r}, or "
            f"set fp8_policy={theirs!r}."
        )


def _require_modules(scheduler: PrecisionScheduler, model: Transformer) -> None:
    theirs = tuple(scheduler.levels)
    ours = modules_in_fp8(model.cfg, scheduler.aim, scheduler.hardware)
    if theirs != ours:
        others = sorted(set(theirs) ^ set(ours)) or theirs
        raise ValueError(
            "a precision scheduler must be made for the model that it watches; got one "
            f"that differs in {', '.join(map(repr, others[:3]))}. Make it anew: "
            f"PrecisionScheduler(model.cfg, aim={scheduler.aim.name!r})."
        )


def _means(layer: InFp8) -> str:
    """Return in words what multiplies."""
    device = next(layer.parameters()).device
    place = "this CPU" if device.type == "cpu" else str(device)
    name = layer.backend.name
    return f"emulated on {place}" if name == "emulate" else f"by {name} on {place}"
