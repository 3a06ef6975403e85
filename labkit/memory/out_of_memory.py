"""An answer when memory runs out: what lived, what would have fitted, what to change.

A real error is answered from the prediction of the step, because nothing was counted.
Under a limit the storages of a step are counted as `measure` counts them, on any
device, and the step is stopped by the operator that passes the limit. On a GPU this
has not been run.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from labkit.config import TrainConfig
from labkit.config.checks import require_instance, require_whole
from labkit.hardware.units import memory
from labkit.hardware.usage import reachable_memory
from labkit.memory.cost import require_known
from labkit.memory.formats import converted_formats
from labkit.memory.measure import (
    BACKWARD,
    BEFORE_FORWARD,
    FORWARD,
    OPTIMIZER,
    StepWatch,
    report_of,
)
from labkit.memory.persistent import States, states_of
from labkit.memory.predict import predict
from labkit.memory.recompute import recompute_policies, require_transformer
from labkit.memory.remedies import Fit, Remedy, remedies, what_fits
from labkit.memory.report import MemoryReport
from labkit.memory.ways import UNCERTAINTY, require_kinds
from labkit.model import Transformer

N_REMEDIES = 3
N_MODULES = 3
"""How many of each an answer names."""

ALONE = ("micro_batch", "recompute", "precision", "seq_len")
"""What one rank of a `Trainer` can change by itself, of `ways.KINDS`."""

BF16 = States(weights="bfloat16", gradients="bfloat16", moments="bfloat16")
"""Of a BF16 model: its gradients, and moments of PyTorch's optimizers, are BF16 too."""

_CPU_ALLOCATOR = "DefaultCPUAllocator: "
"""Stands in the RuntimeError of a CPU that has no memory left."""


class OutOfMemory(MemoryError):
    """Tells what filled the memory in a step, and what would make it fit."""

    def __init__(
        self,
        message: str,
        *,
        report: MemoryReport,
        fit: Fit,
        remedies: tuple[Remedy, ...],
        is_undone: bool,
    ) -> None:
        super().__init__(message)
        self.report = report
        """What lived: under a limit as counted until then, else as predicted."""
        self.fit = fit
        self.remedies = remedies
        """All that were found, the cheapest that fits first."""
        self.is_undone = is_undone
        """Whether no weight was changed: then the step can be done again."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, as another process gets it, is not made of the message alone.
        make = partial(
            type(self),
            report=self.report,
            fit=self.fit,
            remedies=self.remedies,
            is_undone=self.is_undone,
        )
        return make, self.args


@contextmanager
def memory_guard(  # noqa: PLR0913, each decides alone
    model: Transformer,
    train: TrainConfig,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    limit: int | None = None,
    n_held: int = 0,
    kinds: Sequence[str] = ALONE,
    **as_predict: Any,  # noqa: ANN401, handed on
) -> Iterator[None]:
    """Turn memory that runs out in a training step into `OutOfMemory`.

    The model's gradients, which may be those of half a step, are dropped then. So are
    the variables of all functions that the error left: what they held is free again.
    Without a limit the step runs as it would alone.

    Args:
        model: is trained in the step.
        train: batch, sequence and precision of the step.
        optimizer: of the step; its state counts from the beginning under a limit.
        limit: bytes of tensors that may live at once, the model's included. An
            operator that passes it ends the step, unless weights have been changed
            already: then the step is done first. None is no limit.
        n_held: bytes that the caller holds beside the step, such as earlier states of
            the run: of the limit, or of the memory that there is, the step has the
            rest.
        kinds: of remedies, as for `remedies`; what fits is told of these alone.
        **as_predict: as for `predict`; the model's policies of recompute and the dtype
            of its weights are known.

    Raises:
        ValueError: another model than a `Transformer`, a limit that is no number of
            bytes, or an unknown kind.
        OutOfMemory: memory ran out.

    >>> from labkit.config import PRESETS
    >>> model, train = Transformer(PRESETS["tiny"]), TrainConfig(micro_batch=4)
    >>> tokens = torch.zeros(4, 256, dtype=torch.int64)
    >>> try:
    ...     with memory_guard(model, train, limit=48 * 2**20):
    ...         model.loss(tokens, tokens).total.backward()
    ... except OutOfMemory as error:
    ...     print(error.remedies[0].change)
    micro_batch=1
    """
    require_transformer(model)
    require_instance({"train": train}, TrainConfig)
    if limit is not None:
        require_whole({"limit": limit})
    require_kinds(kinds)
    require_known(as_predict)
    guard = _Guard(model, train, as_predict, tuple(kinds), limit, n_held)
    watch = None if limit is None else _LimitWatch(model, optimizer, limit, n_held)
    try:
        with nullcontext() if watch is None else watch.watching():
            yield
    except (MemoryError, RuntimeError) as error:
        stop = _stop_of(error, watch, model)
        if stop is None:
            raise
        model.zero_grad(set_to_none=True)
        traceback.clear_frames(error.__traceback__)
        raise guard.answer(stop) from (None if stop.is_limit else error)
    finally:
        if watch is not None:
            watch.close()
    if watch is not None and watch.stop is not None:
        raise guard.answer(watch.stop)


class _Stop(NamedTuple):
    """Where a step ran out of memory."""

    cause: str
    phase: str
    module: str | None
    is_undone: bool
    is_limit: bool = False
    report: MemoryReport | None = None
    """What lived, if it was counted."""


class _LimitPassed(MemoryError):
    """Ends a step that passes its limit."""


class _LimitWatch(StepWatch):
    """Counts the storages of a step, and ends it when they pass the limit."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        limit: int,
        n_held: int,
    ) -> None:
        super().__init__(model)
        self.limit, self.n_held = limit, n_held
        self.optimizer = optimizer
        self.stop: _Stop | None = None
        self.has_changed_weights = False
        if optimizer is not None:
            self.take_optimizer(optimizer)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401, operators return anything
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except _LimitPassed:
            raise  # of a guard further out, if not this one's
        except (MemoryError, RuntimeError) as error:
            if self.stop is None and is_out_of_memory(error):
                self.stop = self._stop(_first_line(error), *self.path[-1:])
            raise

    def _after(
        self,
        func: torch._ops.OpOverload,
        inputs: Sequence[Shaped[Tensor, "..."]],
        outputs: Sequence[Shaped[Tensor, "..."]],
        n_before: int,
    ) -> None:
        super()._after(func, inputs, outputs, n_before)
        if self.phases[-1].name == OPTIMIZER and func._schema.is_mutable:
            parts = {self.persistent.get(self.number_of(x) or 0) for x in inputs}
            self.has_changed_weights |= not parts.isdisjoint(("weights", "master"))
        if self.live_bytes + self.n_held > self.limit and self.stop is None:
            operator = func.overloadpacket.__name__
            cause = f"{operator} passed the limit of {memory(self.limit)}"
            # In the backward no module runs, but what one kept is used.
            keepers = [self.kept_by.get(self.number_of(x) or 0) for x in inputs]
            self.stop = self._stop(cause, *self.path[-1:], *keepers, is_limit=True)
            if self.stop.is_undone:
                raise _LimitPassed(cause)

    def _stop(self, cause: str, *modules: str | None, is_limit: bool = False) -> _Stop:
        if self.optimizer is not None:
            self.take_optimizer(self.optimizer)  # what it began to hold
        return _Stop(
            cause,
            self.phases[-1].name,
            next((name for name in modules if name in self.names.values()), None),
            is_undone=not self.has_changed_weights,
            is_limit=is_limit,
            report=report_of(self),
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is no memory left, as PyTorch says it.

    >>> try:
    ...     torch.empty(2**50)
    ... except RuntimeError as error:
    ...     print(is_out_of_memory(error), is_out_of_memory(RuntimeError("shape")))
    True False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def _stop_of(
    error: BaseException, watch: _LimitWatch | None, model: nn.Module
) -> _Stop | None:
    """Return where the step ran out of memory; None if the error is another one."""
    if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
        return None
    if watch is not None and watch.stop is not None:
        return watch.stop
    if isinstance(error, _LimitPassed):
        return None  # of a guard further out
    phase, module = _where(error, model)
    is_undone = phase != OPTIMIZER
    return _Stop(_first_line(error), phase, module, is_undone=is_undone)


def _first_line(error: BaseException) -> str:
    """Return what an error says, without where in PyTorch's sources it stands."""
    lines = (str(error) or type(error).__name__).partition(_CPU_ALLOCATOR)
    return "".join(lines[1:] if lines[1] else lines).splitlines()[0]


def _where(error: BaseException, model: nn.Module) -> tuple[str, str | None]:
    """Return phase and module in which an error was raised, by what was running."""
    names = {id(part): name for name, part in model.named_modules()}
    names[id(model)] = type(model).__name__
    phase, module = BEFORE_FORWARD, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if frame.f_code is torch.autograd.graph._engine_run_backward.__code__:
            phase = BACKWARD
        elif isinstance(owner, torch.optim.Optimizer):
            phase = OPTIMIZER
        elif isinstance(owner, nn.Module) and id(owner) in names:
            module = names[id(owner)]
            phase = BACKWARD if phase == BACKWARD else FORWARD
    return phase, module


class _Guard(NamedTuple):
    """What the answer needs to know of a step."""

    model: Transformer
    train: TrainConfig
    as_predict: Mapping[str, Any]
    kinds: tuple[str, ...]
    limit: int | None
    n_held: int

    def answer(self, stop: _Stop) -> OutOfMemory:
        """Return the error that tells what to do."""
        weight = next(self.model.parameters())
        device, is_bf16 = weight.device, weight.dtype == torch.bfloat16
        capacity = max((self.limit or reachable_memory(device)) - self.n_held, 1)
        arguments = {
            "cfg": self.model.cfg,
            "train": self.train,
            "device": "gpu" if device.type == "cuda" else "cpu",
            "recompute": recompute_policies(self.model),
            "states": BF16 if is_bf16 else states_of(self.train),
            "cached": self._cached(),
            **self.as_predict,
        }
        predicted = predict(**arguments)
        fit = what_fits(**arguments, capacity=capacity)
        found = remedies(**arguments, capacity=capacity, kinds=self.kinds)
        needs = f"such a step needs {memory(predicted.peak)}, as predicted"
        if predicted.peak * (1 + UNCERTAINTY) <= capacity:
            helps = [f"{needs}, and would fit: look for what else holds memory"]
        else:
            fits = _what_fits(self.train, fit, self.kinds)
            helps = [needs, *fits, *_what_helps(found)]
        lived = [*_what_lived(stop, stop.report or predicted)]
        if self.n_held:
            lived.append(f"and {memory(self.n_held)} are held beside the step")
        return OutOfMemory(
            "\n".join([_headline(stop), *lived, *helps, _what_is_left(stop)]),
            report=stop.report or predicted,
            fit=fit,
            remedies=found,
            is_undone=stop.is_undone,
        )

    def _cached(self) -> Mapping[str, str] | str:
        """Return what layers in FP8 keep; a run in FP8 may have none now."""
        formats = converted_formats(self.model)
        return formats if formats or self.train.precision == "fp8" else "compute"


def _headline(stop: _Stop) -> str:
    where = stop.phase if stop.module is None else f"{stop.phase} of {stop.module}"
    return f"out of memory, {where}: {stop.cause}"


def _what_lived(stop: _Stop, report: MemoryReport) -> Iterator[str]:
    """Yield what lived as the memory ran out, by part, and which modules kept most."""
    instant, source = report.timeline[-1], "counted"
    if stop.report is None:
        source = "predicted"
        same = [x for x in report.timeline if x.name == stop.phase]
        instant = same[-1] if same else report.timeline[0]
    yield f"{memory(instant.total)} lived then ({source}): {_largest(instant.by_part)}"
    if report.by_module and instant.by_part.get("activations"):
        yield f"of the activations: {_largest(report.by_module, N_MODULES)}"


def _largest(sizes: Mapping[str, int], n: int | None = None) -> str:
    ordered = sorted(sizes.items(), key=lambda item: -item[1])[:n]
    return ", ".join(f"{name} {memory(n_bytes)}" for name, n_bytes in ordered)


def _what_fits(train: TrainConfig, fit: Fit, kinds: Sequence[str]) -> Iterator[str]:
    """Yield the most that fits of what may be changed, if anything may."""
    found = []
    for name, other in (("micro_batch", "seq_len"), ("seq_len", "micro_batch")):
        if name in kinds:
            value = getattr(fit, name)
            most = f"no {name}" if value is None else f"{name}={value}"
            found.append(f"{most} with {other}={getattr(train, other)}")
    if found:
        yield f"what fits: {'; '.join(found)}"


def _what_helps(found: Sequence[Remedy]) -> Iterator[str]:
    """Yield the cheapest remedies, or those nearest to it if none fits."""
    if any(remedy.fits for remedy in found):
        yield "remedies, the cheapest first, each with its predicted peak and time:"
    else:
        found = sorted(found, key=lambda remedy: remedy.peak)
        nearest = "; nearest come, with their predicted peaks:" if found else ""
        yield f"nothing that was tried fits{nearest}"
    for number, remedy in enumerate(found[:N_REMEDIES], start=1):
        note = "" if remedy.fits else " (too much)"
        yield f"  {number}. {memory(remedy.peak)}{note} with {remedy}"


def _what_is_left(stop: _Stop) -> str:
    if stop.is_undone:
        return "no weight was changed, and the gradients are dropped"
    if stop.is_limit:
        return "weights were being changed already, so the step was done"
    return "weights were being changed: go on from what was saved before"
