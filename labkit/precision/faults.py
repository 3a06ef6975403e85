"""Faults to order: what may befall a run, so that one sees what catches it.

A fault changes the input of one module, or how it quantizes, in chosen forward passes.
Passes are counted as they are made, not by the step they belong to: a fault that has
passed does not come back when a run is taken back to an earlier step.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from labkit.config.checks import (
    require_choice,
    require_flag,
    require_name,
    require_whole,
)
from labkit.model.experts import Experts
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.precision.linear import Fp8Recipe, InFp8

KINDS = ("inf", "outlier", "imbalance", "floor")

OUTLIER = 1e5
"""Factor on the values of the first channel."""

FAINT, ONE_IN = 1e-5, 10
"""Factor on all tokens, but for one in so many."""

FLOOR = 6.0
"""Magnitude below which a tile counts as zero under "floor".

Published kernels take 1e-4. A loss that is a mean over DeepSeek-V3's batch of 62.9
million tokens has gradients 61,440 times smaller than one over the 1,024 of "tiny",
which are lost to a floor of 6 as those would be to 1e-4. Of all that was tried, "tiny"
diverges under no plan; under this one it stops learning well: after 38 steps with all
of "deepseek-v3" in FP8 its loss was 3.20, and 2.70 in BF16 (means of 10 steps).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What befalls the input of a module, and when."""

    kind: str
    """One of `KINDS`: the first value is infinite; the first channel is 100,000 times
    as large; nine of ten tokens are a hundred-thousandth as large; or, while the module
    is in FP8, tiles below `FLOOR` count as zero, which few gradients survive."""

    module: str
    """Its name in the model."""

    first: int
    """Forward passes of training that it is spared: micro-batches, not steps."""

    last: int | None
    """The last pass that it befalls, counted from 0; None for all from the first."""

    only_in_fp8: bool = False
    """Whether it befalls the module only while that is in FP8, as a trouble of
    precision does, and ends when a scheduler has made it "high"."""

    def __post_init__(self) -> None:
        require_choice({"kind": self.kind}, KINDS)
        require_name({"module": self.module})
        require_whole({"first": self.first}, at_least=0)
        if self.last is not None:
            require_whole({"last": self.last}, at_least=self.first)
        require_flag({"only_in_fp8": self.only_in_fp8})

    def befalls(self, n_passes: int) -> bool:
        """Return whether it befalls the pass after so many."""
        return self.first <= n_passes and (self.last is None or n_passes <= self.last)


def faulty(x: Float[Tensor, "*b c"], kind: str) -> Float[Tensor, "*b c"]:
    """Return a tensor with a fault; its gradient passes through the same factors.

    >>> faulty(torch.ones(1, 2), "outlier").tolist()
    [[100000.0, 1.0]]
    """
    factor = torch.ones_like(x)
    if kind == "inf":
        factor.view(-1)[0] = torch.inf
    elif kind == "outlier":
        factor[..., 0] = OUTLIER
    else:
        rows = factor.view(-1, x.shape[-1])
        is_faint = torch.arange(len(rows), device=x.device) % ONE_IN > 0
        rows[is_faint] = FAINT
    return x * factor


class Injection:
    """A fault at work in a model."""

    def __init__(self, model: nn.Module, fault: Fault) -> None:
        self.fault = fault
        self.module = _module_of(model, fault)
        self.n_passes = 0
        """Forward passes of training that the module has made."""
        self.n_befallen = 0
        """Those of them with the fault."""
        self._is_befallen = False
        self._hook = self.module.register_forward_pre_hook(self._before)

    def remove(self) -> None:
        """Spare the model from now on."""
        self._hook.remove()
        if self.fault.kind == "floor":
            self._set_floor(False)

    def _before(
        self, module: nn.Module, args: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        if not torch.is_grad_enabled():
            return None
        # A pass that runs again for its backward is still the same one.
        if torch._C._current_graph_task_id() == -1:
            is_of_fp8 = self.fault.only_in_fp8 or self.fault.kind == "floor"
            self._is_befallen = self.fault.befalls(self.n_passes) and (
                isinstance(module, InFp8) or not is_of_fp8
            )
            self.n_passes += 1
            self.n_befallen += self._is_befallen
        if self.fault.kind == "floor":
            self._set_floor(self._is_befallen)
        elif self._is_befallen:
            return faulty(args[0], self.fault.kind), *args[1:]
        return None

    def _set_floor(self, is_high: bool) -> None:
        """Change the recipe that the pass, and its backward, go by."""
        if isinstance(self.module, InFp8):
            least = FLOOR if is_high else Fp8Recipe().least
            self.module.recipe = replace(self.module.recipe, least=least)


@contextmanager
def inject(model: nn.Module, *faults: Fault) -> Iterator[tuple[Injection, ...]]:
    """Let faults befall a model for as long as the context lasts.

    >>> from labkit.model.linear import Linear
    >>> model = nn.Sequential(Linear(4, 4))
    >>> with inject(model, Fault(kind="inf", module="0", first=1, last=1)) as (fault,):
    ...     outputs = [model(torch.ones(1, 4)).isfinite().all() for _ in range(3)]
    >>> [bool(each) for each in outputs], fault.n_befallen
    ([True, False, True], 1)

    Raises:
        ValueError: the model has no such module, or none that is called by itself with
            numbers, or for "floor" none that multiplies. No fault is in the model then.
    """
    with ExitStack() as stack:
        injections = []
        for fault in faults:
            injections.append(Injection(model, fault))
            stack.callback(injections[-1].remove)
        yield tuple(injections)


def reckless_plan(
    model: nn.Module, names: Iterable[str], *, first: int = 0, last: int | None = None
) -> tuple[Fault, ...]:
    """Return faults that make a plan too aggressive: "floor", of all modules it names.

    The w2 of MLPs are spared; the floor would reach them by another way.

    >>> from labkit.model.linear import Linear
    >>> model = nn.ModuleDict({"wo": Linear(4, 4)})
    >>> [fault.module for fault in reckless_plan(model, ["wo"])]
    ['wo']
    """
    return tuple(
        Fault(kind="floor", module=name, first=first, last=last)
        for name in names
        if not _is_inner(dict(model.named_modules()), name)
    )


def _is_inner(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Return whether a module's owner may read its weight instead of calling it."""
    owner, _, part = name.rpartition(".")
    return part == "w2" and isinstance(modules.get(owner), MLP)


def _module_of(model: nn.Module, fault: Fault) -> nn.Module:
    modules, name = dict(model.named_modules()), fault.module
    module = modules.get(name)
    if fault.kind == "floor" and not isinstance(module, Linear | Experts | None):
        raise ValueError(
            "module must be a linear layer or routed experts for kind='floor', which "
            f"is of their products; got {name!r}, a {type(module).__name__}. Name a "
            "layer in it."
        )
    is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict | None)
    if isinstance(module, nn.Embedding):
        raise ValueError(
            "module must read numbers, of which a fault changes some; got "
            f"{name!r}, which reads tokens. Name the module after it."
        )
    if is_called and not _is_inner(modules, name):
        return module
    raise ValueError(
        "module must be one of the model that is called with its input, which the w2 "
        f"of an MLP in FP8 is not; got {name!r}. Name another, such as its MLP."
    )
