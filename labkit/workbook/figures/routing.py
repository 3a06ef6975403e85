"""One token before a router: affinities, open groups, chosen experts."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.workbook.figures.style import COLOURS, SERIES, canvas

CHOSEN, WATCHED = SERIES[0], SERIES[1]

HEADROOM = 1.22
"""Height of the axis, as a multiple of the highest score: above it stand the names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a router saw of one token, and what it chose."""

    scores: Sequence[float]
    """Affinity plus bias, by expert; groups are consecutive and equal."""

    chosen: Sequence[int]
    """The experts that the token visits."""

    open_groups: Sequence[int]
    """The groups it may choose from."""

    n_groups: int


def routing(
    choice: Choice, *, title: str, watched: tuple[int, float] | None = None
) -> Figure:
    """Return the scores of all experts, closed groups shaded, the chosen as diamonds.

    Args:
        choice: what to draw.
        title: the finding.
        watched: an expert and its affinity alone, to draw what its bias adds.
    """
    fig, axes = canvas(title, x="expert", y="affinity + bias", height=310, grid="y")
    scores, visited = choice.scores, set(choice.chosen)
    per_group = len(scores) // choice.n_groups
    for group in range(choice.n_groups):
        _shade(axes, group, per_group, is_open=group in choice.open_groups)
    others = [expert for expert in range(len(scores)) if expert not in visited]
    axes.plot(others, [scores[e] for e in others], "o", color="#999999", markersize=3)
    chosen = [scores[expert] for expert in choice.chosen]
    axes.plot(choice.chosen, chosen, "D", color=CHOSEN, markersize=6.5)
    if watched is not None:
        _watch(axes, watched, scores[watched[0]])
    margin = 0.01 * len(scores)  # for the marks of the first and the last expert
    axes.set_xlim(-0.5 - margin, len(scores) - 0.5 + margin)
    axes.set_xticks([*range(0, len(scores), per_group)])
    top = max(1.0, *scores)
    axes.set_ylim(min(0.0, *scores) - 0.04 * top, HEADROOM * top)
    return fig


def _shade(axes: Axes, group: int, per_group: int, *, is_open: bool) -> None:
    left = group * per_group - 0.5
    if not is_open:
        axes.axvspan(left, left + per_group, color="#EEEEEE", linewidth=0)
    axes.axvline(left, color="#CCCCCC", linewidth=0.8)
    word = f"group {group}" if is_open else "closed"
    axes.text(
        left + per_group / 2,
        0.99,
        word,
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="top",
        fontsize=8.5,
        color=COLOURS["ink"] if is_open else "#777777",
    )


def _watch(axes: Axes, watched: tuple[int, float], score: float) -> None:
    """Draw an expert's affinity as a ring, and an arrow to where its bias lifts it."""
    expert, affinity = watched
    axes.plot([expert, expert], [affinity, score], color=WATCHED, linewidth=2)
    axes.plot(
        expert,
        affinity,
        "o",
        markerfacecolor="white",
        color=WATCHED,
        markersize=7,
        markeredgewidth=2,
    )
