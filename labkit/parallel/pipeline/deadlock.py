"""Why an order of work would never end, in a sentence."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.parallel.pipeline.actions import (
    FORWARD,
    WEIGHT,
    Action,
    Order,
    Step,
    actions_of,
)


class Result(NamedTuple):
    """What an action waits for: a stage's output, or a gradient of its input."""

    stage: int
    is_gradient: bool
    micro_batch: int


def needs(action: Action, n_stages: int) -> tuple[Result, ...]:
    """Return what must be there before an action can run.

    >>> needs(Action(1, "B", 3), n_stages=4)[1]
    Result(stage=2, is_gradient=True, micro_batch=3)
    """
    stage, kind, micro_batch = action
    if kind == FORWARD:
        return (Result(stage - 1, False, micro_batch),) if stage else ()
    if kind == WEIGHT:
        return (Result(stage, True, micro_batch),)
    own = Result(stage, False, micro_batch)
    if stage == n_stages - 1:
        return (own,)
    return own, Result(stage + 1, True, micro_batch)


def gives(action: Action) -> Result | None:
    """Return what other actions can wait for, which a weight gradient is not."""
    if action.kind == WEIGHT:
        return None
    return Result(action.stage, action.kind != FORWARD, action.micro_batch)


def require_complete(orders: Sequence[Order], n_stages: int, n: int) -> None:
    """Raise ValueError unless every stage does its work once, all on one rank.

    Counts the forward pass and the whole backward, in one piece or two, of each stage
    for each micro-batch.
    """
    where: dict[Action, int] = {}
    for rank, order in enumerate(orders):
        for action in actions_of(order):
            if action in where:
                raise ValueError(
                    f"every action must be done once; got {action} on rank "
                    f"{where[action]} and again on rank {rank}. Leave one out."
                )
            where[action] = rank
    for stage in range(n_stages):
        for micro_batch in range(n):
            _require_passes(where, stage, micro_batch)


def _require_passes(where: Mapping[Action, int], stage: int, micro_batch: int) -> None:
    made = {kind: Action(stage, kind, micro_batch) for kind in "FBIW"}
    kinds = "".join(kind for kind, action in made.items() if action in where)
    if kinds not in ("FB", "FIW"):
        raise ValueError(
            "a stage must run F and then B, or I and W, for each micro-batch; stage "
            f"{stage} runs {' and '.join(kinds) or 'nothing'} for micro-batch "
            f"{micro_batch}. Add what is missing, or take out what is double."
        )
    ranks = {where[made[kind]] for kind in kinds}
    if len(ranks) > 1:
        raise ValueError(
            "the rank that ran a forward pass must run its backward pass, because it "
            f"keeps the activations; stage {stage} runs micro-batch {micro_batch} on "
            f"ranks {' and '.join(map(str, sorted(ranks)))}. Move them to one."
        )


def describe(
    orders: Sequence[Order], at: Sequence[int], missing: Sequence[Result | None]
) -> str:
    """Return who waits for whom, where every rank that is not done waits.

    Args:
        orders: of all ranks, complete.
        at: index of the step where each rank stands; its length where it is done.
        missing: what each rank waits for there, as a `Result`; None where it is done.
    """
    place = {
        result: (rank, index, action)
        for rank, order in enumerate(orders)
        for index, step in enumerate(order)
        for action in step
        if (result := gives(action))
    }
    rank = next(rank for rank, result in enumerate(missing) if result)
    seen = []
    while rank not in seen:
        seen.append(rank)
        rank = place[missing[rank]][0]
    circle = seen[seen.index(rank) :]
    clauses, late = [], None
    for rank in circle:
        other, index, action = place[missing[rank]]
        clause = f"rank {rank} stops at {_step(orders[rank][at[rank]])}, which needs "
        clause += f"{action} of rank {other}" if other != rank else str(action)
        if index > at[other]:
            clause += f", listed behind {_step(orders[other][at[other]])}"
            late = late or action
        clauses.append(clause)
    remedies = [f"Move an action forward, such as {late}"] if late else []
    if any(len(orders[rank][at[rank]]) > 1 for rank in circle):
        remedies.append("part a pair" if late else "Part a pair")
    return (
        f"ranks must not wait for each other in a circle; {'; '.join(clauses)}. "
        f"{', or '.join(remedies)}."
    )


def _step(step: Step) -> str:
    return "+".join(map(str, step))
