"""The quantization explorer: an outlier, tiny tokens, and tiles that bear them or not.

widgets.explore(draw, describe, caption="…", **controls())
"""

import math

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.workbook.figures.quantization import (
    Reach,
    TileLosses,
    Values,
    magnitudes,
)
from labkit.workbook.quantization import (
    MOST_LOST,
    NARROW,
    SCALES,
    TILES,
    HardTensor,
    Trial,
    hard_tensor,
    most_error,
)
from labkit.workbook.widgets.controls import choice, steps

OUTLIERS = tuple(n * 10**k for k in range(6) for n in (1, 3)) + (10**6,)

FAR = 30
"""Size from which an outlier channel stands apart from the others."""

TINY_PERCENT = (0, 1, 5, 25, 50, 90, 99)


def controls() -> dict[str, ValueWidget]:
    """Return the controls, at an activation with an outlier channel."""
    return {
        "outlier": steps("outlier channel", OUTLIERS, value=10**4, unit="× the others"),
        "tiny": steps("tokens 100,000 times smaller", TINY_PERCENT, value=0, unit="%"),
        "tile": choice("one scale for", list(TILES), value="the whole tensor"),
        "scale": choice("scales", list(SCALES)),
        "fmt": choice("format", list(NARROW)),
    }


def draw(outlier: int, tiny: int, tile: str, scale: str, fmt: str) -> Figure:
    """Return the figure for the controls' values."""
    tensor = hard_tensor(outlier, tiny, fmt, scale)
    chosen = tensor.trials[tile]
    return magnitudes(
        Values(
            logs=tensor.x.abs().log2().flatten().numpy(),
            is_lost=(chosen.q.dequantize() == 0).flatten().numpy(),
            marks={"the outlier channel": math.log2(outlier)} if outlier >= FAR else {},
        ),
        reaches=_reaches(chosen),
        table=[_losses(name, tensor, tile) for name in TILES],
        title=_title(tile, chosen),
    )


def _losses(name: str, tensor: HardTensor, tile: str) -> TileLosses:
    trial = tensor.trials[name]
    return TileLosses(
        name=name,
        n_scales=trial.n_scales,
        worst_token=100 * trial.report.worst_row,
        lost=100 * trial.report.underflow,
        will_do=trial.will_do,
        is_chosen=name == tile,
    )


def _reaches(trial: Trial) -> list[Reach]:
    """Return what the tile with the largest scale can say, and that with the least."""
    numbers, scales = trial.q.spec.numbers, trial.q.scale.float()

    def reach(name: str, scale: float) -> Reach:
        ends = (scale * numbers.smallest, scale * numbers.largest)
        low, high = map(math.log2, ends)
        return Reach(name=name, low=low, high=high)

    largest, least = scales.max().item(), scales.min().item()
    if largest == least:
        return [reach("reach of the scale", largest)]
    return [
        reach("reach of the largest scale", largest),
        reach("reach of the smallest scale", least),
    ]


def _title(tile: str, trial: Trial) -> str:
    report = trial.report
    return (
        f"{_first_upper(tile)}: {_percent(report.underflow)} become zero, the worst "
        f"token is off by {_percent(report.worst_row)}"
    )


def describe(outlier: int, tiny: int, tile: str, scale: str, fmt: str) -> str:
    """Return what the controls' values mean, in numbers."""
    tensor = hard_tensor(outlier, tiny, fmt, scale)
    report = tensor.trials[tile].report
    return (
        f"{fmt} with one {scale.replace(' ', '-')} scale for {tile}: error "
        f"{_percent(report.relative_error)} of the whole ({report.sqnr_db:.1f} dB), "
        f"{_percent(report.worst_row)} of the worst token; "
        f"{_percent(report.underflow)} of the values become zero. "
        f"{_verdict(tensor, tile)}"
    )


def _verdict(tensor: HardTensor, tile: str) -> str:
    """Return whether the chosen tiles will do, and which need the fewest scales."""
    chosen, cheapest = tensor.trials[tile], tensor.cheapest
    if chosen.will_do and cheapest == tile:
        end = "" if chosen.n_scales == 1 else "; nothing with fewer would"
        return f"That will do, with {_scales(chosen)}{end}."
    if chosen.will_do:
        fewer = _scales(tensor.trials[cheapest])
        return (
            f"That will do, with {_scales(chosen)}; so would one for {cheapest}, "
            f"with {fewer}."
        )
    text = f"That will not do: {_harm(chosen)}."
    if cheapest is not None:
        return f"{text} One for {cheapest} would: {_good(tensor.trials[cheapest])}."
    return f"{text} {_way_out(tensor)}"


def _harm(trial: Trial) -> str:
    """Return what is wrong, with the bound that it breaks."""
    if not trial.keeps_tokens:
        bound = _percent(most_error(trial.q.spec.format))
        return f"a token loses more than half a step, {bound}, so not by rounding alone"
    return f"more than {_percent(MOST_LOST)} of the values are lost"


def _good(trial: Trial) -> str:
    report = trial.report
    return (
        f"{_percent(report.worst_row)} of the worst token, "
        f"{_percent(report.underflow)} become zero, {_scales(trial)}"
    )


def _way_out(tensor: HardTensor) -> str:
    """Return what comes nearest where no tiles will do, and which format would."""
    nearest = tensor.least_bad
    lost = _percent(tensor.trials[nearest].report.underflow)
    text = f"None of the five would; one for {nearest} comes nearest, and loses {lost}"
    wider = tensor.wider
    if wider is None:
        return f"{text}. No narrow format would: keep it in BF16."
    return f"{text}. {wider[0]} would, with one for {wider[1]}."


def _scales(trial: Trial) -> str:
    return f"{trial.n_scales:,} scale{'s' * (trial.n_scales != 1)}"


def _percent(share: float) -> str:
    """Return a share for readers.

    >>> _percent(0.0264), _percent(0.2481), _percent(0.0), _percent(3e-6)
    ('2.6 %', '24.8 %', '0 %', '0.0003 %')
    """
    percent = 100 * share
    return f"{percent:.1f} %" if percent >= 1 else f"{percent:.1g} %"


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
