"""What would make a training step fit, what each way costs, and what fits as it is.

Arithmetic on `predict`, and on the time that it says runs again: a remedy is tried by
predicting the step that it makes. What depends on a device's links is named, but not
priced.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.config.checks import require_whole
from labkit.memory.ways import KINDS, TIMED, Plan, Way, largest, require_kinds

MOST_SEQUENCES = 2**16
"""Micro-batches are not tried beyond it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change that makes a step need less, as predicted."""

    change: str
    """What to set, as in "micro_batch=4"."""

    cost: str
    """What else it changes, in words."""

    extra_time: float | None
    """Share of the present step's time that it adds; None is not predicted."""

    is_least: bool
    """Whether `extra_time` leaves something out: that operators start more often."""

    arguments: Mapping[str, Any]
    """Arguments of `predict` that it replaces."""

    peak: int
    """Bytes of the changed step's peak."""

    fits: bool
    """Whether that is within the capacity, also with the most of all overheads."""

    level: int
    """What is given up, as `ways.Kind.level`: 0 is time alone."""

    def __str__(self) -> str:
        time = "" if self.extra_time is None else f", {self.extra_time:+.0%} time"
        more = " or more" if time and self.is_least else ""
        return f"{self.change}{time}{more}; {self.cost}"


class Fit(NamedTuple):
    """What fits, each beside the rest of the present recipe."""

    micro_batch: int | None
    """Most sequences at once; None is not even one."""

    seq_len: int | None
    """Longest sequence that the model takes; None is not even the shortest."""


def remedies(  # noqa: PLR0913, each decides alone
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout | None = None,
    device: str = "cpu",
    *,
    capacity: int,
    kinds: Sequence[str] | None = None,
    **as_predict: Any,  # noqa: ANN401, handed on
) -> tuple[Remedy, ...]:
    """Return what makes a step need less, the cheapest that fits first.

    Of each kind that is the cheapest which fits or, if none does, the one that needs
    least; a kind that does not apply is left out. If no single one fits that costs
    time alone, several are taken together.

    Args:
        cfg: the model.
        train: batch, sequence and precision.
        layout: degrees of parallelism; None is one rank alone, and stays so.
        device: as for `predict`.
        capacity: bytes that a rank may use.
        kinds: of `KINDS`; None takes all.
        **as_predict: further arguments of `predict`.

    >>> from labkit.config import PRESETS
    >>> train = TrainConfig(micro_batch=4, global_batch=8)
    >>> for remedy in remedies(PRESETS["tiny"], train, capacity=72 * 2**20):
    ...     if remedy.fits and "recompute" not in remedy.arguments:
    ...         print(f"{remedy.peak / 2**20:.0f} MiB with {remedy.change}")
    55 MiB with micro_batch=2
    62 MiB with precision='bf16'
    67 MiB with seq_len=192
    """
    require_whole({"capacity": capacity})
    kinds = tuple(KINDS) if kinds is None else kinds
    require_kinds(kinds)
    plan = Plan(cfg, capacity, _arguments(train, layout, device, as_predict))
    ways = {kind: _best(plan, kind) for kind in kinds}
    found = [_priced(plan, (way,)) for way in ways.values() if way is not None]
    found.sort(key=_by_price)
    if not found or not found[0].fits or found[0].level > 0:
        together = _together(plan, kinds)
        if len(together) > 1:
            found.append(_priced(plan, together))
    return tuple(sorted(found, key=_by_price))


def what_fits(
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout | None = None,
    device: str = "cpu",
    *,
    capacity: int,
    **as_predict: Any,  # noqa: ANN401, handed on
) -> Fit:
    """Return the largest micro-batch and the longest sequence that fit.

    A smaller micro-batch is tried with others accumulated before it; otherwise a step
    has as many micro-batches as the recipe. Arguments are those of `remedies`.

    >>> from labkit.config import PRESETS
    >>> train = TrainConfig(micro_batch=4, global_batch=8)
    >>> what_fits(PRESETS["tiny"], train, capacity=64 * 2**20)
    Fit(micro_batch=2, seq_len=160)
    """
    require_whole({"capacity": capacity})
    plan = Plan(cfg, capacity, _arguments(train, layout, device, as_predict))
    cp = plan.layout.cp
    shortest, longest = -(-(cfg.n_mtp + 1) // cp), cfg.max_seq_len // cp
    n = largest(lambda n: plan.takes(seq_len=n * cp), shortest, longest)
    return Fit(
        micro_batch=largest(plan.takes_micro_batch, 1, MOST_SEQUENCES),
        seq_len=None if n is None else n * cp,
    )


def _arguments(
    train: TrainConfig,
    layout: Layout | None,
    device: str,
    as_predict: Mapping[str, Any],
) -> dict[str, Any]:
    return {"train": train, "layout": layout, "device": device, **as_predict}


def _best(plan: Plan, kind: str) -> Way | None:
    """Return the cheapest of a kind that fits, else that with the least peak, if any.

    What needs as much as before, or more, is none.
    """
    least, best = plan.report().peak, None
    for way in KINDS[kind].ways(plan):
        report = plan.but(**way[-1]).report()
        if report.peak < least:
            least, best = report.peak, Way(kind, *way)
            if plan.holds(report):
                break
    return best


def _together(plan: Plan, kinds: Sequence[str]) -> tuple[Way, ...]:
    """Return ways one upon the other, cheap kinds first, until they fit.

    The last ones may help so much that less of the first ones would do, or nothing.
    """
    taken: dict[str, Way] = {}
    changed = plan
    for kind in kinds:
        way = _best(changed, kind)
        if way is not None:
            taken[kind] = way
            changed = changed.but(**way.changes)
        if changed.takes():
            break
    for kind in taken if changed.takes() else ():
        others = plan.but(**_changes(way for way in taken.values() if way.kind != kind))
        taken[kind] = _best(others, kind) or taken[kind]
    return tuple(taken.values())


def _changes(ways: Iterable[Way]) -> dict[str, Any]:
    return {name: value for way in ways for name, value in way.changes.items()}


def _priced(plan: Plan, ways: Sequence[Way]) -> Remedy:
    """Return the remedy that takes these ways together."""
    changed = plan.but(**_changes(ways))
    is_timed = all(way.kind in TIMED for way in ways)
    report = changed.report()
    return Remedy(
        change=" and ".join(way.change for way in ways),
        cost="; ".join(way.cost for way in ways),
        extra_time=plan.extra_time(changed) if is_timed else None,
        is_least=any(way.kind == "micro_batch" for way in ways),
        arguments={
            name: value
            for name, value in changed.arguments.items()
            if plan.arguments.get(name) != value
        },
        peak=report.peak,
        fits=changed.holds(report),
        level=max(KINDS[way.kind].level for way in ways),
    )


def _by_price(remedy: Remedy) -> tuple[bool, int, bool, float, int]:
    """Return what sorts remedies: those that fit, by what they give up, by time."""
    time = remedy.extra_time
    return not remedy.fits, remedy.level, time is None, time or 0, remedy.peak
