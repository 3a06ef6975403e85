"""What one training step allocates, in the form of a prediction.

A dispatch mode sees every storage that operators make and free; hooks of modules say
where, hooks of autograd what it keeps, the optimizer what it holds. After the step each
storage is given one part, and the step is played back: what lived, when.

Works on "cpu", on "meta" and on fake tensors, which have sizes but no bytes. What a
kernel uses inside itself is not seen, nor what an allocator adds by rounding. On a GPU
this has not been run.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from labkit.memory.allocations import AllocationCount, Event
from labkit.memory.allocator import allocator_peaks
from labkit.memory.report import Instant, MemoryReport

BEFORE_FORWARD = "before forward"
FORWARD = "forward"
BACKWARD = "backward"
AFTER_BACKWARD = "after backward"
"""Clipping, and the sum of gradients over ranks."""
OPTIMIZER = "optimizer"
AFTER_OPTIMIZER = "after optimizer"

CASTS = "casts"
"""Stands in `by_module` for copies of weights in another dtype, as autocast makes."""

LOSS = "loss"
"""Stands in `by_module` for what is kept outside all modules."""

_COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of the operators that talk to other ranks."""

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Operators whose values are no longer those of one input, moved or rescaled."""


def measure(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> MemoryReport:
    """Run one training step and return what lived, part by part and instant by instant.

    The timeline holds the fullest moment of each phase of the step, each micro-batch
    with its own, and the exact state at three points: "start", "end of forward" and
    "end". Activations are what autograd keeps for the backward, and what else was made
    in a module and still lives when the backward begins; `by_module` names the module
    that kept it first. Logits are what the module `head` returns, and what the loss
    computes from them value by value. What is computed again in the backward counts
    among the temporaries, and so does whatever else has no part of its own.

    The batch is the caller's: what was made before the first module runs is no
    activation. Where the weights are on a GPU, `report.allocator` has what its
    allocator held meanwhile.

    Args:
        step: does one step, or a part of one, with this model.
        model: its parameters and buffers are the weights.
        optimizer: needed only if it holds state but `step` does not call it.

    >>> model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    >>> report = measure(lambda: model(torch.ones(2, 8)).sum().backward(), model)
    >>> report.by_part["activations"], report.by_module
    (32, {'1': 32})
    """
    watch = StepWatch(model)
    if optimizer is not None:
        watch.take_optimizer(optimizer)
    try:
        with allocator_peaks(watch.device) as peaks, watch.watching():
            step()
            of_allocator = peaks()
        return replace(report_of(watch), allocator=of_allocator)
    finally:
        watch.close()


class _Phase(NamedTuple):
    """A stretch of the step, up to the next one."""

    name: str
    start: int
    """Index of its first event."""


class StepWatch(AllocationCount):
    """Counts the storages of a step, and notes what each of them is for."""

    counts_given = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(part): name for name, part in model.named_modules()}
        self.names[id(model)] = type(model).__name__
        self.head = getattr(model, "head", None)
        self.parameters = list(model.parameters())
        self.phases = [_Phase(BEFORE_FORWARD, 0)]
        self.path: list[str] = []
        """Names of the modules that are running, the innermost last."""
        self.persistent: dict[int, str] = {}
        self.was_there: set[int] = set()
        """Storages that last, and are older than the step."""
        self.made_by: dict[int, str] = {}
        """Storages that forward or backward made, and the module that was running."""
        self.kept_by: dict[int, str] = {}
        """Those that autograd keeps, and the module in which it first did."""
        self.casts: set[int] = set()
        self.passing: dict[int, str] = {}
        """Storages of the parts that come and go: logits, dispatch, communication."""
        self._take([*self.parameters, *model.buffers()], "weights")
        self._take([p.grad for p in self.parameters if p.grad is not None], "gradients")

    @property
    def device(self) -> torch.device:
        """Where the weights are; a CPU if there are none."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def _take(self, tensors: Iterable[Shaped[Tensor, "..."]], part: str) -> None:
        for tensor in tensors:
            number = self.number_of(tensor)
            if number is None:
                # Found late, as the state of an optimizer that the step calls.
                number = self.adopt(tensor)
                self.was_there.add(number)
            self.persistent.setdefault(number, part)

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what an optimizer holds now."""
        own = [p for group in optimizer.param_groups for p in group["params"]]
        # Parameters that are not the model's are master copies of them.
        self._take(own, "master")
        state = tree_leaves(list(optimizer.state.values()))
        self._take((x for x in state if isinstance(x, Tensor)), "moments")

    def keep(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Note a storage that autograd keeps; return what it shall keep."""
        number = self.number_of(tensor)
        if number in self.made_by:
            self.kept_by.setdefault(number, self._running)
        # Detached: a result that its own node kept would never be freed.
        return tensor.detach()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count, and be told of modules, optimizers, gradients and what is kept."""
        here = self._only_here
        handles = [
            module_hooks.register_module_forward_pre_hook(here(self._enter_module)),
            module_hooks.register_module_forward_hook(
                here(self._leave_module), always_call=True
            ),
            optimizer_hooks.register_optimizer_step_pre_hook(
                here(self._enter_optimizer)
            ),
            optimizer_hooks.register_optimizer_step_post_hook(
                here(self._leave_optimizer)
            ),
        ]
        handles += [
            parameter.register_post_accumulate_grad_hook(here(self._take_gradient))
            for parameter in self.parameters
            if parameter.requires_grad
        ]
        kept = saved_tensors_hooks(self.keep, lambda tensor: tensor)
        try:
            with kept, self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _only_here(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return the hook, deaf to what other threads do: hooks are those of all.

        Autograd's own threads are no others, for they take on the caller's modes.
        """

        def heard(*args: object) -> None:
            if self in _get_current_dispatch_mode_stack():
                hook(*args)

        return heard

    def _take_gradient(self, owner: Shaped[Tensor, "..."]) -> None:
        self._take([owner.grad], "gradients")

    @property
    def _running(self) -> str:
        return self.path[-1] if self.path else LOSS

    def _enter_module(self, module: nn.Module, args: object) -> None:
        if not _is_backward():
            self._enter(FORWARD)
        self.path.append(self.names.get(id(module), self._running))

    def _leave_module(self, module: nn.Module, args: object, out: object) -> None:
        self.path.pop()
        if module is self.head and isinstance(out, Tensor):
            self.passing[self.adopt(out)] = "logits"

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.take_optimizer(optimizer)
        self._enter(OPTIMIZER)

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.take_optimizer(optimizer)
        self._enter(AFTER_OPTIMIZER)

    def _enter(self, phase: str) -> None:
        if self.phases[-1].name != phase:
            self.phases.append(_Phase(phase, len(self.events)))

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401, operators return anything
        if _is_backward():
            self._enter(BACKWARD)
        elif self.phases[-1].name == BACKWARD:
            self._enter(AFTER_BACKWARD)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _after(
        self,
        func: torch._ops.OpOverload,
        inputs: Sequence[Shaped[Tensor, "..."]],
        outputs: Sequence[Shaped[Tensor, "..."]],
        n_before: int,
    ) -> None:
        if func.namespace in _COLLECTIVES:
            for tensor in (*inputs, *outputs):
                self.passing[self.number_of(tensor) or 0] = "communication"
        if self.n_allocations == n_before:
            return
        sources = {self.number_of(tensor) or 0: tensor.numel() for tensor in inputs}
        for tensor in outputs:
            number = self.number_of(tensor) or 0
            if number > n_before:
                self._note_new(func, sources, number, tensor.numel())

    def _note_new(
        self,
        func: torch._ops.OpOverload,
        sources: Mapping[int, int],
        number: int,
        n_values: int,
    ) -> None:
        operator = func.overloadpacket.__name__
        if self.phases[-1].name in (FORWARD, BACKWARD):
            self.made_by[number] = self._running
        if operator == "index_select":
            # In this package, the gathering of rows for the experts.
            self.passing[number] = "dispatch"
        if operator == "_to_copy" and any(
            self.persistent.get(source) == "weights" for source in sources
        ):
            self.casts.add(number)
        if operator not in _PRODUCTS and any(
            self.passing.get(source) == "logits" and size == n_values
            for source, size in sources.items()
        ):
            self.passing[number] = "logits"


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def report_of(watch: StepWatch) -> MemoryReport:
    """Return the report of a step, or of what was done of it so far."""
    ends = _ends_of_forward(watch)
    kept = dict(watch.kept_by)
    for number in set().union(*ends) - kept.keys():
        if watch.made_by.get(number, LOSS) != LOSS:
            kept[number] = watch.made_by[number]
    kept |= dict.fromkeys(watch.casts & kept.keys(), CASTS)

    def part_of(number: int) -> str:
        if number in watch.persistent:
            return watch.persistent[number]
        passing = watch.passing.get(number, "temporaries")
        return "activations" if number in kept and passing != "logits" else passing

    sizes = {event.number: event.n_bytes for event in watch.events if event.n_bytes > 0}
    ends = ends or [_alive_after(watch.events, watch.was_there)]  # still in forward
    by_module = [Counter() for _ in ends]
    for modules, alive in zip(by_module, ends, strict=True):
        for number in sorted(alive & kept.keys()):
            if part_of(number) == "activations":
                modules[kept[number]] += sizes[number]
    return MemoryReport(
        timeline=tuple(_timeline(watch, sizes, part_of)),
        by_module=dict(max(by_module, key=Counter.total, default={})),
    )


def _ends_of_forward(watch: StepWatch) -> list[set[int]]:
    """Return the storages that live as each backward begins."""
    alive, ends, done = watch.was_there, [], 0
    for phase in watch.phases:
        if phase.name == BACKWARD:
            alive = _alive_after(watch.events[done : phase.start], alive)
            ends.append(alive)
            done = phase.start
    return ends


def _alive_after(events: Sequence[Event], before: set[int]) -> set[int]:
    """Return the storages that live after these events."""
    alive = set(before)
    for event in events:
        if event.n_bytes > 0:
            alive.add(event.number)
        else:
            alive.discard(event.number)
    return alive


def _timeline(
    watch: StepWatch, sizes: Mapping[int, int], part_of: Callable[[int], str]
) -> Iterator[Instant]:
    live: Counter[str] = Counter()
    for number in watch.was_there:
        live[part_of(number)] += sizes.get(number, 0)
    yield Instant(name="start", by_part=dict(+live))
    ends = [phase.start for phase in watch.phases[1:]] + [len(watch.events)]
    for (name, start), end in zip(watch.phases, ends, strict=True):
        if name == BACKWARD:
            yield Instant(name="end of forward", by_part=dict(+live))
        total, most, fullest = 0, 0, dict(+live)
        for number, n_bytes in watch.events[start:end]:
            if n_bytes > 0 and number in watch.was_there:
                continue  # counted at the start, whenever it was seen first
            live[part_of(number)] += n_bytes
            total += n_bytes
            if total > most:
                most, fullest = total, dict(+live)
        yield Instant(name=name, by_part=fullest)
    yield Instant(name="end", by_part=dict(+live))
