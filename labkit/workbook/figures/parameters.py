"""Where a model's parameters are: stored, and at work on one token."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.workbook.figures.style import COLOURS, SERIES, canvas

LETTERS = 78
"""Letters that fit across a bar of 100 per cent."""

FILLS = dict(
    zip(
        ("routed experts", "attention", "shared experts"),
        (SERIES[0], SERIES[4], SERIES[5]),
        strict=True,
    )
) | {"dense networks": SERIES[2], "embedding, head": SERIES[3]}
"""Colours of the parts; the rest is too thin to see, and grey."""


def shares(rows: Mapping[str, Mapping[str, int]], *, title: str) -> Figure:
    """Return one bar per row, cut into the shares of its parts, its sum at the end.

    Args:
        rows: parameters by part, by the name of the row; an empty name is a gap.
        title: the finding.
    """
    fig, axes = canvas(
        title,
        x="share (%); at the right the sum, in billions of parameters",
        height=130 + 36 * len(rows),
        grid="x",
    )
    for place, parts in enumerate(rows.values()):
        _bar(axes, place, _merged(parts))
        total = sum(parts.values())
        axes.text(101, place, f"{total / 1e9:,.1f} B", va="center", fontweight="bold")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 113)
    axes.set_xticks(range(0, 101, 20))
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    fig.legend(
        list(named.values()),
        list(named),
        loc="outside lower left",
        ncols=len(named),
        frameon=False,
        handlelength=1,
        columnspacing=1.0,
        fontsize=8.5,
    )
    return fig


def _merged(parts: Mapping[str, int]) -> dict[str, int]:
    """Return the parts that are drawn: what has no colour of its own is the rest."""
    merged = dict.fromkeys([*FILLS, "router, norms"], 0)
    for name, amount in parts.items():
        ends = "embedding, head" if name in ("embedding", "head") else "router, norms"
        merged[name if name in merged else ends] += amount
    return merged


def _bar(axes: Axes, place: int, parts: Mapping[str, int]) -> None:
    total, left = sum(parts.values()), 0.0
    for name, amount in parts.items():
        share = 100 * amount / total
        colour = FILLS.get(name, COLOURS["idle"])
        axes.barh(place, share, left=left, color=colour, label=name, height=0.72)
        text = f"{name} {share:.0f} %"
        text = text if len(text) * 100 < share * LETTERS else f"{share:.0f} %"
        if len(text) * 100 < share * LETTERS:
            ink = "white" if colour == SERIES[0] else COLOURS["ink"]
            axes.text(
                left + share / 2, place, text, ha="center", va="center", color=ink
            )
        left += share
