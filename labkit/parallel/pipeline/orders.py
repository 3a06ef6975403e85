"""In which order each rank works under a schedule, as PyTorch runs it.

PyTorch builds its orders without any process, so they are read from its schedules:

    schedule      vpp = 1                      vpp > 1
    gpipe         GPipe                        LoopedBFS
    1f1b          (below)                      Interleaved1F1B
    zero-bubble   InterleavedZeroBubble        InterleavedZeroBubble
    zbv                                        ZBVZeroBubble
    dualpipev                                  DualPipeV
    dualpipe      (below)

Two are written here. PyTorch 2.13 runs 1F1B rightly, but lists its last rank a
micro-batch late, so that order is repeated from what it runs. DualPipe is not in
PyTorch. DualPipeV is one half of it, folded: where a micro-batch turns round at the
last rank of DualPipeV, it goes on to the other half of DualPipe, which comes to meet it
with micro-batches of its own. So both halves of DualPipe work as DualPipeV does, and
the second chunk of a rank serves what the other half fed.
"""

from dataclasses import dataclass
from functools import lru_cache

from labkit.config.checks import require_choice, require_whole
from labkit.parallel.pipeline.actions import BACKWARD, FORWARD, Action, Order, Step

SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev", "dualpipe")
"""Pipeline schedules by name. With `vpp` above 1, 1f1b is interleaved."""

V_SHAPED = ("zbv", "dualpipev")
"""Schedules that go down the ranks with the first chunks and back with the second."""

_IN_TORCH = {
    "gpipe": "LoopedBFS",
    "1f1b": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}

_WITH_ONE_STAGE = {"gpipe": "GPipe", "1f1b": "1F1B"}
"""Those that PyTorch names otherwise where a rank has one stage."""


def chunks_per_rank(schedule: str, vpp: int | None) -> int:
    """Return how many virtual stages lie on a rank; None takes what is usual.

    DualPipe keeps two whole stages on a rank, of which each is also on another, and
    counts as one.

    >>> chunks_per_rank("1f1b", None), chunks_per_rank("zbv", None)
    (1, 2)

    Raises:
        ValueError: no such schedule, or it has another number of them.
    """
    require_choice({"schedule": schedule}, SCHEDULES)
    fixed = 2 if schedule in V_SHAPED else 1 if schedule == "dualpipe" else None
    if vpp is None:
        return fixed or 1
    require_whole({"vpp": vpp})
    if fixed and vpp != fixed:
        raise ValueError(
            f"schedule={schedule!r} needs vpp={fixed}; got vpp={vpp}. Set vpp={fixed} "
            "or leave it out."
        )
    return vpp


def orders(
    schedule: str, pp: int, micro_batches: int, *, vpp: int | None = None
) -> tuple[Order, ...]:
    """Return what each of `pp` ranks does in one step, one thing after another.

    Args:
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        micro_batches: of one step; DualPipe feeds half of them from each end.
        vpp: virtual stages of each rank; None takes what the schedule needs.

    >>> from labkit.parallel.pipeline.actions import written
    >>> for order in orders("1f1b", 2, 3):
    ...     written(order)
    '0F0 0F1 0B0 0F2 0B1 0B2'
    '1F0 1B0 1F1 1B1 1F2 1B2'

    Raises:
        ValueError: the schedule cannot run so.
    """
    vpp = chunks_per_rank(schedule, vpp)
    require_whole({"pp": pp, "micro_batches": micro_batches})
    require_fit(schedule, pp, micro_batches, vpp)
    return _orders(schedule, pp, micro_batches, vpp)


@lru_cache(maxsize=64)
def _orders(schedule: str, pp: int, n: int, vpp: int) -> tuple[Order, ...]:
    if schedule == "dualpipe":
        return _dualpipe(pp, n)
    if schedule == "1f1b" and vpp == 1:
        return tuple(_one_forward_one_backward(pp, n, rank) for rank in range(pp))
    return _from_torch(name_in_torch(schedule, vpp), pp, n, vpp)


def name_in_torch(schedule: str, vpp: int) -> str:
    """Return what PyTorch calls a schedule.

    >>> name_in_torch("1f1b", 1), name_in_torch("1f1b", 2)
    ('1F1B', 'Interleaved1F1B')

    Raises:
        ValueError: PyTorch has no such schedule.
    """
    require_choice({"schedule": schedule}, tuple(_IN_TORCH))
    names = _IN_TORCH | _WITH_ONE_STAGE if vpp == 1 else _IN_TORCH
    return names[schedule]


def _one_forward_one_backward(pp: int, n: int, rank: int) -> Order:
    """Fill up to the last stage, then a backward for each forward, then drain."""
    n_ahead = pp - rank
    order = [(Action(rank, FORWARD, index),) for index in range(n_ahead)]
    for index in range(n):
        order.append((Action(rank, BACKWARD, index),))
        if index + n_ahead < n:
            order.append((Action(rank, FORWARD, index + n_ahead),))
    return tuple(order)


def _dualpipe(pp: int, n: int) -> tuple[Order, ...]:
    """Unfold DualPipeV: the other half of the ranks does the same from its end."""
    first = orders("dualpipev", pp // 2, n // 2)
    near = [
        _unfold(order, rank, n // 2, is_far=False) for rank, order in enumerate(first)
    ]
    far = [
        _unfold(order, rank, n // 2, is_far=True) for rank, order in enumerate(first)
    ]
    return (*near, *reversed(far))


def _unfold(order: Order, rank: int, half: int, *, is_far: bool) -> Order:
    """Tell whose micro-batches the two chunks of a rank serve.

    The first chunk has what was fed at the rank's own end, the second what comes from
    the other end. Micro-batches of the far end are the second half.
    """

    def unfold(action: Action) -> Action:
        is_second = action.stage != rank
        offset = half if is_second != is_far else 0
        return action._replace(micro_batch=action.micro_batch + offset)

    return tuple(tuple(unfold(action) for action in step) for step in order)


@dataclass(slots=True)
class _Shape:
    """What PyTorch asks of a stage to order its work."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] | None = None


def _from_torch(name: str, pp: int, n: int, vpp: int) -> tuple[Order, ...]:
    # Imported late: it takes as long as the rest of PyTorch.
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleSingle,
        get_schedule_class,
    )

    schedule = get_schedule_class(name)
    stages = [_Shape(num_stages=pp * vpp, group_size=pp) for _ in range(vpp)]
    is_single = issubclass(schedule, PipelineScheduleSingle)
    listed = schedule(stages[0] if is_single else stages, n).pipeline_order
    return tuple(
        tuple(step for action in listed[rank] if (step := _read(action)))
        for rank in range(pp)
    )


def _read(action: object) -> Step:
    """Return an action of PyTorch as ours; none for a pause or a reduction."""
    if action is None or not action.is_compute_op:
        return ()
    return tuple(
        Action(each.stage_index, each.computation_type.value, each.microbatch_index)
        for each in action.sub_actions or (action,)
    )


def require_fit(
    schedule: str, pp: int, n: int, vpp: int, *, name: str = "micro_batches"
) -> None:
    """Raise ValueError where PyTorch, or DualPipe, could not run.

    Args:
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        n: micro-batches of one step.
        vpp: virtual stages of each rank.
        name: what errors call `n`.
    """
    if schedule == "dualpipe" and (pp % 2 or n % 2):
        raise ValueError(
            "schedule='dualpipe' pairs the stages and the micro-batches of both ends "
            f"and needs an even number of each; got pp={pp} and {name}={n}. Set "
            f"pp={pp + pp % 2} and {name}={n + n % 2}."
        )
    least = _least(schedule, pp, vpp)
    if n < least:
        raise ValueError(
            f"schedule={schedule!r} needs at least {least} micro-batches to fill "
            f"pp={pp} ranks; got {name}={n}. Set {name}={least} or lower pp."
        )
    n_rounds = max(n // pp, 1)
    is_in_rounds = schedule == "zero-bubble" or (schedule == "1f1b" and vpp > 1)
    if is_in_rounds and n % n_rounds:
        raise ValueError(
            f"schedule={schedule!r} with vpp={vpp} takes micro-batches in {n_rounds} "
            f"equal rounds of at least pp={pp}; got {name}={n}. Set "
            f"{name}={n_rounds * pp} or {(n_rounds + 1) * pp}."
        )


def _least(schedule: str, pp: int, vpp: int) -> int:
    """Return the micro-batches that a schedule cannot do without."""
    if schedule in ("dualpipev", "dualpipe"):
        return 2 * pp
    return pp if schedule == "1f1b" and vpp == 1 else 1
