"""Memory that grows from step to step: what it is, and who holds it.

A storage that outlives its step is no leak; one from every step is. So survivors are
sorted by the step that made them and by the name that holds them. What autograd alone
holds is found by walking the graph from the tensors that can still be seen, and a
cache that grows in place by following each storage to the larger one that took over.
"""

import gc
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from torch import nn

from labkit.config.checks import require_instance, require_whole
from labkit.memory.births import Birth, BirthCount
from labkit.memory.holders import NOBODY, find_holders, hook_owners
from labkit.memory.survivors import Survivor, find_survivors, tensors_in

CAUSES = {
    "graph": (
        "a result kept with its graph",
        "Keep the number, loss.item(), or the tensor without its graph, .detach().",
    ),
    "hook": (
        "hooks that are added at every step",
        "Register once, before the loop, or call remove() on the handle.",
    ),
    "closure": (
        "a closure that keeps a tensor alive",
        "Let the function capture the number it needs, or drop the function after use.",
    ),
    "container": (
        "a collection that only grows",
        "Keep numbers, x.item() or x.tolist(), or use a deque with a maxlen.",
    ),
    "concatenation": (
        "a cache that grows by concatenation",
        "Allocate it once and write into it; empty it between sequences.",
    ),
    "positions": (
        "a cache that is written always at its end",
        "Start the positions of each batch at 0, or rewind the cache before it.",
    ),
    "unknown": (
        "storages that nobody visible holds",
        "Watch fewer parts of the step at a time, until the growth is gone.",
    ),
}
"""What a leak can be, and the remedy."""

LAST_STEPS = 3
"""A leak has grown within as many of the last steps: what has filled up is none."""

FEWEST_STEPS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Something that grows at every step, or nearly."""

    cause: str
    """A key of `CAUSES`."""

    holder: str
    """The variable, attribute or module that holds it."""

    grown: str
    """What one step adds."""

    bytes_per_step: int
    """Of storages; hooks alone take none."""

    def __str__(self) -> str:
        what, remedy = CAUSES[self.cause]
        return (
            f"{what}: {self.holder} grows by {self.bytes_per_step:,} bytes a step "
            f"({self.grown}). {remedy}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakReport:
    """What a watched run left behind."""

    live_bytes: tuple[int, ...]
    """Bytes at the end of each step that were made in the run and still live."""

    bytes_per_step: int
    """The median slope of `live_bytes`, the first steps left out."""

    leaks: tuple[Leak, ...]
    """The largest first; empty for a clean run."""

    def __str__(self) -> str:
        if not self.leaks:
            return f"no leak in {len(self.live_bytes)} steps"
        return "\n".join(map(str, self.leaks))


class LeakWatch(BirthCount):
    """Watches a training loop for memory that grows.

    It sees what operators of this thread allocate while it is active, at some 50 µs an
    operator; the report takes a second or so. A collection that is not yet full cannot
    be told from one that grows for ever: watch more than twice the steps it holds. One
    that has nothing of the first half of them is taken for full, although it may have
    begun to grow after that.

    Args:
        model: its modules are watched for hooks, and give names.
        n_warm_up: first steps that do not count, as they allocate what stays.

    >>> import torch
    >>> layer, history = nn.Linear(4, 4), []
    >>> with LeakWatch(layer) as watch:
    ...     for _ in range(8):
    ...         history.append(layer(torch.ones(1, 4)).sum())
    ...         watch.end_step()
    >>> leak = watch.report().leaks[0]
    >>> leak.cause, leak.holder
    ('graph', '`history`')
    """

    def __init__(self, model: nn.Module, *, n_warm_up: int = 2) -> None:
        super().__init__()
        require_instance({"model": model}, nn.Module)
        require_whole({"n_warm_up": n_warm_up}, at_least=0)
        self.model, self.n_warm_up = model, n_warm_up
        self.live: list[int] = []
        self._n_hooks = [_count_hooks(model)]

    def end_step(self) -> None:
        """Note that a step has ended."""
        super().end_step()
        self.live.append(self.live_bytes)
        self._n_hooks.append(_count_hooks(self.model))

    def report(self) -> LeakReport:
        """Return what grew in the steps so far, and who holds it.

        Call it where the loop's variables are still there.

        Raises:
            ValueError: too few steps, or none of them was seen.
        """
        fewest = self.n_warm_up + FEWEST_STEPS
        if self.n_steps < fewest:
            raise ValueError(
                f"a leak shows after at least {fewest} steps, {self.n_warm_up} of them "
                f"to warm up; got {self.n_steps}. Call end_step after each step, and "
                "watch more of them."
            )
        if not self.n_allocations:
            raise ValueError(
                "steps must run where they are watched, within `with watch:` and in "
                f"one thread; got {self.n_steps} of which no operator was seen. Run "
                "them there."
            )
        survivors, pool = [], []
        if self._old() or self._grown():
            gc.collect()
            pool = gc.get_objects()  # before anything of ours refers to them
            survivors = find_survivors(self, self._old(), self.model, pool)
        leaks = self._leaks_by_survivors(survivors) + self._leaks_by_growth(pool)
        leaks = self._with_hooks(leaks)
        if not leaks:
            leaks = self._unknown(survivors)
        live = self.live[self.n_warm_up :]
        return LeakReport(
            live_bytes=tuple(self.live),
            bytes_per_step=round(_slope(live)),
            leaks=tuple(sorted(leaks, key=lambda leak: -leak.bytes_per_step)),
        )

    def _old(self) -> dict[int, Birth]:
        """Return storages of step after step that live, if there are any."""
        last = self.n_steps - 1  # whose own have had no time to go
        living = self.living().items()
        old = {n: b for n, b in living if self.n_warm_up <= b.step < last}
        return old if self._is_going_on({b.step for b in old.values()}, last) else {}

    def _grown(self) -> dict[int, Birth]:
        """Return storages that took over from smaller ones, step after step."""
        return {
            number: birth
            for number, birth in self.living().items()
            if self._is_going_on([step for step, _ in birth.grown_from], self.n_steps)
        }

    def _leaks_by_survivors(self, survivors: Sequence[Survivor]) -> list[Leak]:
        """Return the holders that have kept something of step after step."""
        last = self.n_steps - 1
        middle = (self.n_warm_up + last) / 2
        held = [survivor for survivor in survivors if not survivor.holder.is_bounded]
        owners: dict[str, set[int]] = defaultdict(set)
        for survivor in held:
            owners[survivor.holder.text].add(survivor.holder.owner)
        by_name: dict[str, list[Survivor]] = defaultdict(list)
        for survivor in held:
            holder = survivor.holder
            # Where each step adds an owner, it is their collection that grows.
            is_many = len(owners[holder.text]) >= LAST_STEPS
            name = holder.within if is_many and holder.within else holder.text
            by_name[name].append(survivor)
        leaks = []
        for name, survivors in by_name.items():
            steps = {survivor.birth.step for survivor in survivors}
            # What has let go of all that was made in the first half has a length.
            if self._is_going_on(steps, last) and min(steps) <= middle:
                n_each = len(survivors) / len(steps)
                largest = max((s.birth for s in survivors), key=lambda b: b.n_bytes)
                n_watched = last - self.n_warm_up
                n_bytes = sum(survivor.birth.n_bytes for survivor in survivors)
                leak = Leak(
                    cause=_cause(survivors),
                    holder=name,
                    grown=f"{n_each:.3g} storages, the largest {largest.looks}",
                    bytes_per_step=round(n_bytes / n_watched),
                )
                leaks.append(leak)
        return leaks

    def _is_going_on(self, steps: Iterable[int], end: int) -> bool:
        counted = [step for step in steps if step >= self.n_warm_up]
        return len(counted) >= LAST_STEPS and max(counted) >= end - LAST_STEPS

    def _leaks_by_growth(self, pool: Sequence[object]) -> list[Leak]:
        """Return those who hold a storage that grows by being replaced."""
        grown = self._grown()
        tensors = {self.number_of(x): x for x in tensors_in(pool)}
        held = [tensors[number] for number in grown if number in tensors]
        by_name: dict[str, list[Birth]] = defaultdict(list)
        for tensor, holder in zip(
            held, find_holders(held, self.model, pool), strict=True
        ):
            if holder is not NOBODY:
                by_name[holder.text].append(grown[self.number_of(tensor)])
        return [
            Leak(
                cause="positions"
                if all(map(self._is_placed, births))
                else "concatenation",
                holder=name,
                grown=f"now {', '.join(sorted({birth.looks for birth in births}))}",
                bytes_per_step=round(sum(map(self._growth, births))),
            )
            for name, births in by_name.items()
        ]

    def _is_placed(self, birth: Birth) -> bool:
        """Return whether values are written into a storage, and never at its start."""
        starts = [start for step, start in birth.writes if step >= self.n_warm_up]
        return bool(starts) and min(starts) > 0

    def _growth(self, birth: Birth) -> float:
        """Return the bytes by which a storage has grown at each step."""
        links = [link for link in birth.grown_from if link[0] >= self.n_warm_up]
        first_step, first_bytes = links[0]
        return (birth.n_bytes - first_bytes) / (birth.step - first_step)

    def _with_hooks(self, leaks: list[Leak]) -> list[Leak]:
        """Return the leaks, and the places where hooks have been added."""
        # Of two leaks of one holder, as where a cache keeps graphs, the larger counts.
        leaks = sorted(leaks, key=lambda leak: leak.bytes_per_step)
        by_holder = {leak.holder: leak for leak in leaks}
        counts = self._n_hooks[self.n_warm_up :]
        for name in counts[-1]:
            numbers = [count.get(name, 0) for count in counts]
            steps = [
                step
                for step, (before, after) in enumerate(
                    zip(numbers, numbers[1:], strict=False), start=self.n_warm_up
                )
                if after > before
            ]
            if self._is_going_on(steps, self.n_steps):
                each = (numbers[-1] - numbers[0]) / (len(numbers) - 1)
                known = by_holder.get(name)
                by_holder[name] = Leak(
                    cause="hook",
                    holder=name,
                    grown=f"{each:.3g} hooks",
                    bytes_per_step=known.bytes_per_step if known else 0,
                )
        return list(by_holder.values())

    def _unknown(self, survivors: Sequence[Survivor]) -> list[Leak]:
        """Return a leak if there is growth at every step that nothing bounded does."""
        live = [
            n_bytes
            - sum(
                survivor.birth.n_bytes
                for survivor in survivors
                if survivor.holder.is_bounded and survivor.birth.step <= step
            )
            for step, n_bytes in enumerate(self.live)
        ][self.n_warm_up : -1]
        if any(after <= before for before, after in zip(live, live[1:], strict=False)):
            return []
        bounded = [x.birth.n_bytes for x in survivors if x.holder.is_bounded]
        if self.live_bytes - sum(bounded) <= live[0]:
            return []  # the collector of cycles has found it, and would have later
        largest = max(self.living().values(), key=lambda birth: birth.n_bytes)
        return [
            Leak(
                cause="unknown",
                holder=NOBODY.name,
                grown=f"the largest that lives is {largest.looks}",
                bytes_per_step=round(_slope(live)),
            )
        ]


def _cause(survivors: Sequence[Survivor]) -> str:
    """Return the cause that explains most: a graph holds more than its result."""
    if any(survivor.is_in_graph for survivor in survivors):
        return "graph"
    holder = survivors[0].holder
    if holder is NOBODY:
        return "unknown"
    if holder.is_hook:
        return "hook"
    return "closure" if holder.closure else "container"


def _count_hooks(model: nn.Module) -> dict[str, int]:
    return {name: len(hooks) for name, hooks in hook_owners(model).items() if hooks}


def _slope(values: Sequence[int]) -> float:
    """Return the median of the slopes between any two values (Theil and Sen).

    >>> _slope([0, 4, 8, 100, 16])
    4.0
    """
    pairs = [(i, j) for j in range(len(values)) for i in range(j)]
    return float(median((values[j] - values[i]) / (j - i) for i, j in pairs))
