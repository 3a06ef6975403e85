"""What a pipeline rank holds: which layers, and how many micro-batches at a time.

A schedule decides both. Its *virtual stages* are the model cut in order; a *chunk* is
one of them as it lies on a rank.

    schedule     chunks of rank r            micro-batches kept, most in all
    gpipe        r, r + pp, ...              all
    1f1b         r, r + pp, ...              pp - r; interleaved: a warm-up more
    zero-bubble  r, r + pp, ...              pp of each chunk
    zbv          r, 2 pp - 1 - r             2 pp of both chunks together
    dualpipev    r, 2 pp - 1 - r             2 pp + 1 of both chunks together
    dualpipe     r, pp - 1 - r               pp + 1 of both chunks together

`layout.vpp` chunks lie on each rank. DualPipe is the exception: it feeds the pipeline
from both ends, and so keeps every stage on two ranks (DeepSeek-V3, section 3.2.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.config import Layout, ModelConfig
from labkit.config.checks import require_choice, require_whole

SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev", "dualpipe")
"""Pipeline schedules by name. With `layout.vpp` above 1, 1f1b is interleaved."""

V_SHAPED = ("zbv", "dualpipev")
"""Schedules that go down the ranks with the first chunks and back with the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Consecutive layers on one rank."""

    layers: range
    """Indices of main layers; may be empty."""

    is_first: bool = False
    """Whether it begins with the embedding."""

    is_last: bool = False
    """Whether it ends with the MTP modules, the final norm and the head."""


class Contents(NamedTuple):
    """How many of each part of the model lie on one pipeline rank."""

    n_dense: int
    """Main layers with a dense feed-forward network."""

    n_sparse: int
    """Main layers with experts."""

    n_embeddings: int
    n_output_heads: int
    """Each with the final norm."""

    n_mtp: int
    n_routers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """All that one pipeline rank holds."""

    chunks: tuple[Chunk, ...]

    n_copies: int = 1
    """Pipeline ranks that hold each of these chunks."""

    def contents(self, cfg: ModelConfig) -> Contents:
        """Return what this holds; equal contents weigh the same.

        MTP modules read the embedding, so a rank that has them has it too.
        """
        n_first_dense = cfg.n_layers - cfg.n_moe_layers
        n_layers = sum(len(chunk.layers) for chunk in self.chunks)
        n_dense = sum(_overlap(chunk.layers, n_first_dense) for chunk in self.chunks)
        has_head = any(chunk.is_last for chunk in self.chunks)
        n_mtp = cfg.n_mtp if has_head else 0
        n_sparse = n_layers - n_dense
        return Contents(
            n_dense=n_dense,
            n_sparse=n_sparse,
            n_embeddings=int(n_mtp > 0 or any(c.is_first for c in self.chunks)),
            n_output_heads=int(has_head),
            n_mtp=n_mtp,
            n_routers=0 if cfg.moe is None else n_sparse + n_mtp,
        )


def _overlap(layers: range, n_first: int) -> int:
    """Return how many of these layers are among the first `n_first`."""
    return max(min(layers.stop, n_first) - layers.start, 0)


def stage_layers(
    cfg: ModelConfig,
    layout: Layout,
    *,
    schedule: str = "1f1b",
    layers_per_stage: Sequence[int] | None = None,
) -> tuple[Stage, ...]:
    """Return what each pipeline rank holds, first rank first.

    Args:
        cfg: the model.
        layout: `pp` ranks with `vpp` chunks each.
        schedule: one of `SCHEDULES`.
        layers_per_stage: main layers of each virtual stage, in order. None spreads
            them evenly, where the head and each MTP module count as a layer.

    >>> from labkit.config import PRESETS
    >>> stages = stage_layers(PRESETS["v3-671b"], Layout(pp=16, dp=128, ep=64))
    >>> [len(stage.chunks[0].layers) for stage in stages]
    [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1]

    Raises:
        ValueError: the schedule does not fit the layout, or the layers the stages.
    """
    _require_schedule(schedule, layout)
    n_virtual = layout.pp * layout.vpp
    split = given_split(layers_per_stage)
    layers_per_stage = _spread(cfg, n_virtual) if split is None else split
    _require_split(cfg, n_virtual, layers_per_stage)
    chunks = _cut(layers_per_stage)
    return tuple(
        Stage(
            chunks=tuple(
                chunks[index] for index in virtual_stages(layout, rank, schedule)
            ),
            n_copies=2 if schedule == "dualpipe" else 1,
        )
        for rank in range(layout.pp)
    )


def given_split(layers_per_stage: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return `layers_per_stage` as it can be remembered; None stays so.

    Raises:
        ValueError: it does not list whole numbers.
    """
    if layers_per_stage is None:
        return None
    if isinstance(layers_per_stage, str) or not isinstance(layers_per_stage, Sequence):
        raise ValueError(
            "layers_per_stage must list the layers of each virtual stage; got "
            f"{layers_per_stage!r}. Give a list, as layers_per_stage=[2, 2], or leave "
            "it out for an even split."
        )
    each = {f"layers_per_stage[{index}]": n for index, n in enumerate(layers_per_stage)}
    require_whole(each, at_least=0)
    return tuple(layers_per_stage)


def virtual_stages(layout: Layout, rank: int, schedule: str) -> tuple[int, ...]:
    """Return which virtual stages lie on a pipeline rank, in the order of its chunks.

    >>> virtual_stages(Layout(pp=4, vpp=2), 1, "1f1b")
    (1, 5)
    >>> virtual_stages(Layout(pp=4, vpp=2), 1, "dualpipev")
    (1, 6)
    """
    if schedule == "dualpipe":
        return rank, layout.pp - 1 - rank
    if schedule in V_SHAPED:
        return rank, 2 * layout.pp - 1 - rank
    return tuple(range(rank, layout.pp * layout.vpp, layout.pp))


def in_flight(
    layout: Layout, rank: int, n_micro_batches: int, *, schedule: str = "1f1b"
) -> tuple[int, ...]:
    """Return how many micro-batches each chunk of a rank keeps activations of.

    Taken at the first instant at which the rank keeps most in all; later ones may keep
    as many in another mix. Activations count until the weight gradient is done.
    Sources: table 2 of the DeepSeek-V3 report for sums over chunks, the orders of
    PyTorch's schedules for the rest. PyTorch has no DualPipe: its mix was worked out by
    hand from the phases of its authors' code, which no test runs.

    Args:
        layout: `pp` ranks with `vpp` chunks each.
        rank: of the pipeline, 0 for the first.
        n_micro_batches: of one step; DualPipe feeds half of them from each end.
        schedule: one of `SCHEDULES`.

    >>> in_flight(Layout(pp=16), 0, 120), in_flight(Layout(pp=16), 15, 120)
    ((16,), (1,))
    >>> in_flight(Layout(pp=8, vpp=2), 3, 120, schedule="dualpipev")
    (13, 4)

    Raises:
        ValueError: the schedule does not fit the layout, or a number is out of range.
    """
    _require_schedule(schedule, layout)
    require_whole({"n_micro_batches": n_micro_batches})
    require_whole({"rank": rank}, at_least=0)
    if rank >= layout.pp:
        raise ValueError(
            f"rank must be below pp={layout.pp}, the ranks of the pipeline; got "
            f"{rank}. Set rank={layout.pp - 1} or less."
        )
    pp, n_fed = layout.pp, n_micro_batches
    match schedule:
        case "gpipe":
            kept = (n_fed,) * layout.vpp
        case "1f1b" if layout.vpp > 1:
            kept = _interleaved(layout, rank, n_fed)
        case "1f1b":
            kept = (pp - rank,)
        case "zero-bubble":
            kept = (pp,) * layout.vpp
        case "zbv":
            kept = (2 * pp - 1 - rank, rank + 1)
        case "dualpipev":
            kept = (2 * pp - rank, rank + 1)
        case _:
            kept, n_fed = (pp - rank, rank + 1), -(-n_fed // 2)
    return tuple(min(n, n_fed) for n in kept)


def _interleaved(layout: Layout, rank: int, n_micro_batches: int) -> tuple[int, ...]:
    """Count the forward passes before the first backward pass, by chunk.

    Groups of about `pp` micro-batches go through a rank's chunks in turn. The last
    chunk's group then waits for the ranks after this one, there and back.
    """
    group = n_micro_batches // max(n_micro_batches // layout.pp, 1)
    waiting = 2 * (layout.pp - 1 - rank) + 1
    n_forwards = min((layout.vpp - 1) * group + waiting, layout.vpp * n_micro_batches)
    per_round = group * layout.vpp
    n_rounds, rest = divmod(n_forwards, per_round)
    return tuple(
        n_rounds * group + min(max(rest - chunk * group, 0), group)
        for chunk in range(layout.vpp)
    )


def _spread(cfg: ModelConfig, n_virtual: int) -> list[int]:
    """Return main layers per virtual stage, the remainder going to the first ones."""
    if cfg.n_layers < n_virtual:
        raise ValueError(
            "a pipeline needs a layer for each of its pp * vpp virtual stages; got "
            f"{cfg.n_layers} layers for {n_virtual}. Lower pp or vpp."
        )
    if n_virtual == 1:
        return [cfg.n_layers]
    n_ends = 1 + cfg.n_mtp
    last = max((cfg.n_layers + n_ends) // n_virtual - n_ends, 1)
    each, rest = divmod(cfg.n_layers - last, n_virtual - 1)
    return [each + (index < rest) for index in range(n_virtual - 1)] + [last]


def _cut(layers_per_stage: Sequence[int]) -> list[Chunk]:
    chunks, start = [], 0
    for index, n_layers in enumerate(layers_per_stage):
        chunks.append(
            Chunk(
                layers=range(start, start + n_layers),
                is_first=index == 0,
                is_last=index == len(layers_per_stage) - 1,
            )
        )
        start += n_layers
    return chunks


def _require_schedule(schedule: str, layout: Layout) -> None:
    require_choice({"schedule": schedule}, SCHEDULES)
    if schedule in V_SHAPED and layout.vpp != 2:
        raise ValueError(
            f"schedule={schedule!r} puts two chunks on each rank and needs vpp=2; got "
            f"vpp={layout.vpp}. Set vpp=2 in the layout."
        )
    if schedule != "dualpipe":
        return
    if layout.vpp != 1:
        raise ValueError(
            "schedule='dualpipe' puts two whole stages on each rank and needs vpp=1; "
            f"got vpp={layout.vpp}. Set vpp=1, or take schedule='dualpipev'."
        )
    if layout.pp % 2:
        raise ValueError(
            "schedule='dualpipe' pairs the stages of both ends and needs an even pp; "
            f"got pp={layout.pp}. Set pp={layout.pp + 1}, or take "
            "schedule='dualpipev'."
        )


def _require_split(
    cfg: ModelConfig, n_virtual: int, layers_per_stage: Sequence[int]
) -> None:
    if len(layers_per_stage) != n_virtual or sum(layers_per_stage) != cfg.n_layers:
        raise ValueError(
            "layers_per_stage must name the layers of each virtual stage, which are "
            f"pp * vpp = {n_virtual}, and sum to n_layers={cfg.n_layers}; got "
            f"{len(layers_per_stage)} numbers that sum to {sum(layers_per_stage)}. "
            "Correct it, or leave it out for an even split."
        )
