"""Runs in FP8: losses beside those of BF16, and what a scheduler did when.

    paired_losses(runs, window=…, title=…)            curves, window means, spread
    scheduler_timeline(start, decisions, losses, title=…)

`runs` maps two names, the reference first, to the losses of each seed. `start` maps
modules to levels, `decisions` are records with `step`, `module` and `after`, `losses`
are pairs of step and loss in the order in which they were computed, so that a step that
was rolled back is among them twice.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.precision.plan import ranges
from labkit.workbook.figures.charts import Points
from labkit.workbook.figures.precision import panels
from labkit.workbook.figures.style import COLOURS, SERIES

LEVELS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "fp8": ("#0072B2", "FP8"),
        "fp8-high-wgrad": ("#8CCBF0", "FP8, wgrad high"),
        "high": ("#DDDDDD", "high"),
    }
)
"""Colour and name of a level: the darker, the more is in FP8."""

DECISION: Mapping[str, Any] = MappingProxyType(
    {"marker": "D", "linestyle": "", "color": COLOURS["ink"], "markersize": 4.5}
)
"""The look of a decision's mark."""

BEYOND: Mapping[str, Any] = MappingProxyType(
    {"marker": "^", "linestyle": "", "color": SERIES[1], "markersize": 6}
)
"""The look of a loss that has no place on the axis."""

ROW = 21
"""Pixels of a row of a timeline."""

LETTERS = 33
"""That fit beside a row."""


@runtime_checkable
class Decided(Protocol):
    """A change of a module's level."""

    @property
    def step(self) -> int: ...
    @property
    def module(self) -> str: ...
    @property
    def after(self) -> str: ...


def paired_losses(
    runs: Mapping[str, Sequence[Sequence[float]]],
    *,
    window: int,
    title: str,
    bound: float = 0.5,
    per_value: int = 1,
) -> Figure:
    """Return losses of two kinds of runs in pairs, and the gap between their means.

    Args:
        runs: losses by step for each seed, of the reference and of what is compared
            with it; seeds in the same order, all runs equally long.
        window: steps of which a mean is taken, a multiple of `per_value`.
        title: the finding.
        bound: gap that is allowed, in percent.
        per_value: steps of which each loss is the mean already.

    Raises:
        ValueError: not two kinds, or runs that are no pairs.
    """
    (reference, first), (other, second) = _pairs(runs)
    margins = {"left": 0.1, "right": 0.86, "top": 0.9, "bottom": 0.12, "hspace": 0.25}
    fig, (upper, lower) = panels(
        title, 2, 1, height=400, sharex=True, gridspec_kw=margins
    )
    n_values = window // per_value
    n_steps, n_means = per_value * first.shape[1], first.shape[1] // n_values
    steps = n_steps - window * np.arange(n_means)[::-1]
    for name, losses, colour in ((reference, first, 0), (other, second, 1)):
        means = window_means(losses, n_values)
        for seed in means:
            upper.plot(steps, seed, color=SERIES[colour], linewidth=0.8, alpha=0.6)
        style = "-" if colour == 0 else "--"
        upper.plot(steps, means.mean(0), style, color=SERIES[colour], label=name)
    upper.set_ylabel("loss")
    upper.legend(frameon=False)
    _draw_gap(lower, steps, gaps(first, second, n_values), bound=bound)
    lower.set_ylabel(f"{other} above {reference} (%)")
    lower.set_xlabel(f"step; each point is the mean of the {window} steps up to it")
    return fig


def _pairs(
    runs: Mapping[str, Sequence[Sequence[float]]],
) -> list[tuple[str, Float[np.ndarray, "seeds steps"]]]:
    lengths = {len(seed) for seeds in runs.values() for seed in seeds}
    numbers = {len(seeds) for seeds in runs.values()}
    if len(runs) != 2 or len(lengths) != 1 or len(numbers) != 1:
        raise ValueError(
            "runs must be two kinds with as many seeds each and as many steps; got "
            f"{len(runs)} kinds, seeds {sorted(numbers)}, steps {sorted(lengths)}. "
            "Give each kind the same seeds, for as many steps."
        )
    return [(name, np.asarray(seeds, float)) for name, seeds in runs.items()]


def window_means(
    losses: Float[np.ndarray, "seeds steps"], window: int
) -> Float[np.ndarray, "seeds windows"]:
    """Return the means of windows of steps, the last one whole, by seed.

    >>> window_means(np.array([[9.0, 1.0, 3.0, 5.0, 7.0]]), 2).tolist()
    [[2.0, 6.0]]
    """
    n = losses.shape[-1] // window
    whole = losses[:, losses.shape[-1] - n * window :]
    return whole.reshape(len(losses), n, window).mean(-1)


def gaps(
    reference: Float[np.ndarray, "seeds steps"],
    other: Float[np.ndarray, "seeds steps"],
    window: int,
) -> Float[np.ndarray, "seeds windows"]:
    """Return by how many percent each seed's window means exceed the reference's.

    >>> gaps(np.array([[2.0, 2.0]]), np.array([[2.0, 2.2]]), 1).round(6).tolist()
    [[0.0, 10.0]]
    """
    before, after = window_means(reference, window), window_means(other, window)
    return 100 * (after / before - 1)


def _draw_gap(
    axes: Axes,
    steps: Int[np.ndarray, "windows"],
    gap: Float[np.ndarray, "seeds windows"],
    *,
    bound: float,
) -> None:
    """Draw the mean gap, the seeds' spread and the bound; name the last gap."""
    mean = gap.mean(0)
    axes.axhspan(-bound, bound, color="#EEEEEE", linewidth=0)
    axes.text(steps[0], bound, f"±{bound:g} %", va="top", fontsize=9, color="#666666")
    axes.axhline(0, color="#666666", linewidth=1)
    axes.fill_between(steps, gap.min(0), gap.max(0), color=SERIES[1], alpha=0.25)
    axes.plot(steps, mean, color=SERIES[1], marker="o", markersize=3)
    text = f"{mean[-1]:+.2f} %\n({gap[:, -1].min():+.2f} to {gap[:, -1].max():+.2f})"
    axes.annotate(
        text,
        (steps[-1], mean[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=SERIES[1],
        annotation_clip=False,
    )


def scheduler_timeline(
    start: Mapping[str, str],
    decisions: Sequence[Decided],
    losses: Points,
    *,
    title: str,
) -> Figure:
    """Return modules' levels over the steps computed, decisions marked, loss below.

    Modules that have the same history share a row. Where a step's number is not beyond
    the one before, the run was rolled back.

    Args:
        start: level of each module before the first step.
        decisions: changes of levels, in order.
        losses: pairs of step and loss, in the order of computing.
        title: the finding.
    """
    numbers = [int(step) for step, _ in losses]
    rows = _histories(start, decisions, decided_at(numbers, decisions))
    height = 270 + ROW * len(rows)
    margins = {"left": 0.33, "right": 0.97, "hspace": 0.08}
    margins |= {"top": 1 - 66 / height, "bottom": 52 / height}
    fig, (upper, lower) = panels(
        title,
        2,
        1,
        height=height,
        sharex=True,
        height_ratios=(ROW * len(rows), 140),
        gridspec_kw=margins,
    )
    for row, (changes, names) in enumerate(rows.items()):
        _draw_levels(upper, row, changes, n_steps=len(numbers))
        upper.annotate(
            label_of(names),
            (0, row),
            xycoords=("axes fraction", "data"),
            xytext=(-5, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8.5,
        )
    upper.set_ylim(len(rows) - 0.5, -0.5)
    upper.set_yticks([])
    upper.set_xlim(0, len(numbers))
    upper.grid(visible=False)
    upper.tick_params(bottom=False)
    _name_levels(fig, y=1 - 30 / height)
    _draw_losses(lower, losses)
    return fig


def decided_at(numbers: Sequence[int], decisions: Sequence[Decided]) -> list[int]:
    """Return where in the steps computed each decision was made.

    Args:
        numbers: the steps computed, those that were rolled back among them.
        decisions: in order; one whose step was never computed is where the one before
            it is.
    """
    places, at = [], 0
    for decision in decisions:
        later = range(at, len(numbers))
        at = next((i for i in later if numbers[i] == decision.step), at)
        places.append(at)
    return places


def _histories(
    start: Mapping[str, str], decisions: Sequence[Decided], places: Sequence[int]
) -> dict[tuple[tuple[int, str], ...], list[str]]:
    """Return modules by their history: place and level of each change."""
    changes = {name: [(0, level)] for name, level in start.items()}
    for decision, place in zip(decisions, places, strict=True):
        changes.setdefault(decision.module, []).append((place, decision.after))
    rows: dict[tuple[tuple[int, str], ...], list[str]] = {}
    for name, history in changes.items():
        rows.setdefault(tuple(history), []).append(name)
    # The first to change on top; those that never do have the highest place of all.
    order = sorted(rows, key=lambda row: [at for at, _ in row[1:]] or [math.inf])
    return {history: rows[history] for history in order}


def label_of(names: Sequence[str]) -> str:
    """Return a short name for modules, cut to what a row has room for.

    >>> label_of(["layers.1.attn.wo"])
    'layers.1.attn.wo'
    >>> label_of([f"layers.{i}.attn.{w}" for i in (0, 1, 3) for w in ("wq_a", "wo")])
    'layers 0-1, 3: wq_a, wo'
    >>> label_of([f"mtp.0.block.attn.{word}" for word in ("wq_a", "wo")])
    'MTP: wq_a, wo'
    """
    if len(names) == 1:
        return names[0]
    words = [name.split(".") for name in names]
    depths = sorted({int(each[1]) for each in words if each[0] == "layers"})
    places = [f"layers {ranges(depths)}"] if depths else []
    places += ["MTP"] if any(each[0] == "mtp" for each in words) else []
    parts = list(dict.fromkeys(each[-1] for each in words))
    text = f"{' and '.join(places)}: {', '.join(parts)}"
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"


def _draw_levels(
    axes: Axes, row: int, changes: Sequence[tuple[int, str]], *, n_steps: int
) -> None:
    """Draw a row of levels, with a mark at each change."""
    ends = [place for place, _ in changes[1:]] + [n_steps]
    for (place, level), end in zip(changes, ends, strict=True):
        axes.barh(row, end - place, left=place, color=LEVELS[level][0], height=0.72)
    at = [place for place, _ in changes[1:]]
    axes.plot(at, [row] * len(at), **DECISION)


def _name_levels(fig: Figure, *, y: float) -> None:
    """Put the key to colours and marks below the title."""
    keys = [Patch(color=colour, label=name) for colour, name in LEVELS.values()]
    keys.append(Line2D([], [], **DECISION, label="decision"))
    keys.append(Line2D([], [], color=SERIES[1], label="rolled back"))
    keys.append(Line2D([], [], **BEYOND, label="above the axis, or not finite"))
    fig.legend(
        handles=keys,
        loc="upper left",
        bbox_to_anchor=(0.005, y),
        ncols=len(keys),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.4,
        borderpad=0,
    )


def _draw_losses(axes: Axes, losses: Points) -> None:
    """Draw the loss; in another colour where steps were given up later."""
    numbers, values = (np.array(each, float) for each in zip(*losses, strict=True))
    later = np.minimum.accumulate(numbers[::-1])[::-1]
    is_lost = np.append(later[1:] <= numbers[:-1], False)
    kept = values[~is_lost & np.isfinite(values)]
    top = 1.15 * kept.max() if kept.size else 1.0
    steps = np.arange(len(values))
    for is_drawn, colour in ((~is_lost, SERIES[0]), (is_lost, SERIES[1])):
        axes.plot(steps, np.where(is_drawn, values, np.nan), color=colour)
    beyond = steps[~(values <= top)]  # NaN among them
    axes.plot(beyond, [top] * len(beyond), **BEYOND, clip_on=False)
    for place in steps[1:][numbers[1:] <= numbers[:-1]]:
        axes.axvline(place, color=SERIES[1], linestyle="--", linewidth=1.3)
    low = kept.min() if kept.size else 0.0
    axes.set_ylim(low - 0.08 * (top - low), top)
    axes.set_ylabel("loss")
    axes.set_xlabel("steps computed; some are rolled back and computed again")
