"""Who does what when in a pipeline, how long ranks wait, and what they keep meanwhile.

Each rank does its steps in order, each as soon as what it needs has come. Sends take
time and hold up nobody, as on a link of their own.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.config.checks import named, require_at_least
from labkit.parallel.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Order,
    Step,
    actions_of,
    written,
)
from labkit.parallel.pipeline.deadlock import (
    Result,
    describe,
    gives,
    needs,
    require_complete,
)
from labkit.parallel.pipeline.orders import orders

PerStage = float | tuple[float, ...]
"""The same number for every stage, or one for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds that a virtual stage takes for one micro-batch.

    A rank with two chunks has two virtual stages of half its layers, so that the same
    model takes half as long in each.
    """

    f: PerStage = 1.0
    """Forward pass."""

    b: PerStage = 2.0
    """Whole backward pass."""

    w: PerStage = 1.0
    """The part of `b` for the gradients of weights."""

    hidden: float = 0.0
    """What an overlapped pair saves: DeepSeek's F&B is `f + b - hidden`."""

    send: float = 0.0
    """From the end of a pass to the arrival of its result on another rank."""

    def __post_init__(self) -> None:
        require_at_least(named(self, "hidden", "send"), 0)
        for name in ("f", "b", "w"):
            value = getattr(self, name)
            if isinstance(value, list):
                raise ValueError(
                    f"{name} must be a number, or a tuple with one for each virtual "
                    f"stage; got {value!r}. Set {name}={tuple(value)!r}."
                )
            for seconds in value if isinstance(value, tuple) else (value,):
                require_at_least({name: seconds}, 0)

    def of(self, kind: str, stage: int) -> float:
        """Return the seconds of one action."""
        if kind == INPUT:
            return _at(self.b, stage) - _at(self.w, stage)
        return _at({FORWARD: self.f, BACKWARD: self.b, WEIGHT: self.w}[kind], stage)

    def of_step(self, step: Step) -> float:
        """Return the seconds of an action or of an overlapped pair."""
        alone = sum(self.of(action.kind, action.stage) for action in step)
        return alone - self.hidden * (len(step) - 1)

    def require_stages(self, n_stages: int) -> None:
        """Raise ValueError unless the numbers make sense for that many stages."""
        for name in ("f", "b", "w"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != n_stages:
                raise ValueError(
                    f"{name} must be one number, or one for each of the {n_stages} "
                    f"virtual stages; got {len(value)} of them. Correct {name}."
                )
        for stage in range(n_stages):
            f, b, w = (_at(value, stage) for value in (self.f, self.b, self.w))
            if w > b:
                raise ValueError(
                    f"w is a part of b and must be at most as long; got w={w} and b={b}"
                    f" for stage {stage}. Set b to the whole backward pass."
                )
            if self.hidden > min(f, b):
                raise ValueError(
                    "hidden must leave an overlapped pair as long as the longer of the "
                    f"two, so be at most min(f, b)={min(f, b)}; got {self.hidden}. "
                    "Lower hidden."
                )


def _at(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, tuple) else value


class Span(NamedTuple):
    """A step of a rank, in time."""

    start: float
    stop: float
    step: Step


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Timeline:
    """One training step of a pipeline, from the first pass to the last."""

    spans: tuple[tuple[Span, ...], ...]
    """What each rank does, in order; between spans it waits."""

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(spans[-1].stop for spans in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank works."""
        return tuple(sum(s.stop - s.start for s in spans) for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank waits, from the first start to the last end of all."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds that each rank waits between its first step and its last.

        Where an optimizer step need not wait for other ranks, this is all that is lost.
        """
        return tuple(
            spans[-1].stop - spans[0].start - busy
            for spans, busy in zip(self.spans, self.busy, strict=True)
        )

    @property
    def bubble(self) -> float:
        """Seconds that the rank waits which waits most."""
        return max(self.idle)

    @property
    def bubble_share(self) -> float:
        """The bubble as a share of the step."""
        return self.bubble / self.seconds

    def peak_live(self, rank: int) -> dict[int, int]:
        """Return micro-batches kept by stage, at the first instant of most in all.

        From the forward pass to the end of the weight gradient.
        """
        live: set[tuple[int, int]] = set()
        fullest: set[tuple[int, int]] = set()
        for stage, kind, micro_batch in actions_of(s.step for s in self.spans[rank]):
            if kind == FORWARD:
                live.add((stage, micro_batch))
            elif kind in (BACKWARD, WEIGHT):
                live.remove((stage, micro_batch))
            if len(live) > len(fullest):
                fullest = set(live)
        return dict(Counter(stage for stage, _ in fullest))

    def written(self, rank: int) -> str:
        """Return what a rank does as one line, as `parse` reads it."""
        return written(span.step for span in self.spans[rank])

    def __repr__(self) -> str:
        # A stage counts once for each micro-batch that it keeps activations of.
        kept = [sum(self.peak_live(rank).values()) for rank in range(len(self.spans))]
        return (
            f"Timeline({len(self.spans)} ranks in {self.seconds:g} s: bubble "
            f"{self.bubble:g} s, {self.bubble_share:.1%}; {max(kept)} stages kept)"
        )


def pipeline_timeline(
    schedule: str,
    pp: int,
    micro_batches: int,
    times: Times | None = None,
    *,
    vpp: int | None = None,
) -> Timeline:
    """Return the step of a pipeline under one of PyTorch's schedules, or DualPipe.

    Args:
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        micro_batches: of one step; DualPipe feeds half of them from each end.
        times: of a virtual stage; None counts in units of a forward pass, where a
            backward pass takes two.
        vpp: virtual stages of each rank; None takes what the schedule needs.

    >>> pipeline_timeline("1f1b", 4, 8)
    Timeline(4 ranks in 33 s: bubble 9 s, 27.3%; 4 stages kept)
    >>> pipeline_timeline("zero-bubble", 4, 8).bubble
    3.0

    Raises:
        ValueError: the schedule cannot run so, or a time makes no sense.
    """
    return timeline_of(orders(schedule, pp, micro_batches, vpp=vpp), times)


def timeline_of(of_ranks: Sequence[Order], times: Times | None = None) -> Timeline:
    """Return the step that ranks make which work in these orders.

    Raises:
        ValueError: something is missing or double, ranks would wait for each other
            without end, or a time makes no sense.
    """
    every = [action for order in of_ranks for action in actions_of(order)]
    if not every or not all(of_ranks):
        raise ValueError(
            "every rank must have something to do; got an empty order. Leave out ranks "
            "without work."
        )
    n_stages = 1 + max(action.stage for action in every)
    n_micro_batches = 1 + max(action.micro_batch for action in every)
    require_complete(of_ranks, n_stages, n_micro_batches)
    times = times or Times()
    times.require_stages(n_stages)
    return Timeline(spans=_Run(of_ranks, n_stages, times).spans())


class _Run:
    """Works through orders; a rank that waits is woken by what it waits for."""

    def __init__(self, of_ranks: Sequence[Order], n_stages: int, times: Times) -> None:
        self.orders, self.n_stages, self.times = of_ranks, n_stages, times
        self.done: dict[Result, tuple[float, int]] = {}
        self.waiting: dict[Result, list[int]] = defaultdict(list)
        self.made: list[list[Span]] = [[] for _ in of_ranks]

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        ready = list(range(len(self.orders)))
        while ready:
            ready += self._advance(ready.pop())
        at = [*map(len, self.made)]
        if any(index < len(o) for index, o in zip(at, self.orders, strict=True)):
            stuck = [
                self._missing(self._needs(order[index])) if index < len(order) else None
                for index, order in zip(at, self.orders, strict=True)
            ]
            raise ValueError(describe(self.orders, at, stuck))
        return tuple(map(tuple, self.made))

    def _advance(self, rank: int) -> list[int]:
        """Let a rank work until it waits; return the ranks that this wakes."""
        woken = []
        made = self.made[rank]
        for step in self.orders[rank][len(made) :]:
            needed = self._needs(step)
            missing = self._missing(needed)
            if missing:
                self.waiting[missing].append(rank)
                break
            start = max([made[-1].stop if made else 0.0, *self._arrivals(needed, rank)])
            stop = start + self.times.of_step(step)
            made.append(Span(start, stop, step))
            for result in filter(None, map(gives, step)):
                self.done[result] = stop, rank
                woken += self.waiting.pop(result, ())
        return woken

    def _arrivals(self, needed: list[Result], rank: int) -> list[float]:
        found = map(self.done.__getitem__, needed)
        return [
            stop if origin == rank else stop + self.times.send for stop, origin in found
        ]

    def _missing(self, needed: list[Result]) -> Result | None:
        return next((result for result in needed if result not in self.done), None)

    def _needs(self, step: Step) -> list[Result]:
        """Return what a step needs from outside itself."""
        own = [*map(gives, step)]
        return [r for a in step for r in needs(a, self.n_stages) if r not in own]
