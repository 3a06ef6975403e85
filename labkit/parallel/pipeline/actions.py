"""The pieces of work that a pipeline schedule puts in order.

Written as PyTorch writes them: `2F0` is the forward pass of stage 2 for micro-batch 0.
`B` is a whole backward pass; `I` is its part for the stage's input, which the stage
before waits for, and `W` the part for its weights, which no stage waits for. `7F4+0B0`
is a pair that runs as one, each hiding the other's communication.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"

_WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One pass of one stage over one micro-batch."""

    stage: int
    kind: str
    """`F`, `B`, `I` or `W`."""

    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Step = tuple[Action, ...]
"""What a rank does as one: an action, or an overlapped pair."""

Order = tuple[Step, ...]
"""All that one rank does, one after another."""


def parse(lines: Sequence[str]) -> tuple[Order, ...]:
    """Return the orders of all ranks, read from one line each.

    >>> parse(["0F0 0B0", "1F0+1B0"])[1]
    ((Action(stage=1, kind='F', micro_batch=0), Action(stage=1, kind='B', ...)),)

    Raises:
        ValueError: a word is no action.
    """
    return tuple(tuple(_step(word) for word in line.split()) for line in lines)


def written(order: Iterable[Step]) -> str:
    """Return an order as `parse` reads it.

    >>> written(parse(["0F0 0F1+0B0"])[0])
    '0F0 0F1+0B0'
    """
    return " ".join("+".join(map(str, step)) for step in order)


def actions_of(order: Iterable[Step]) -> Iterator[Action]:
    """Yield the actions of an order, pairs taken apart."""
    for step in order:
        yield from step


def _step(word: str) -> Step:
    actions = []
    for each in word.split("+"):
        found = _WRITTEN.fullmatch(each)
        if found is None:
            raise ValueError(
                "an action must be a stage, one of F, B, I and W, and a micro-batch, "
                f"as 2F0, or a pair of them, as 2F1+2B0; got {word!r}. Correct the "
                "order."
            )
        actions.append(Action(int(found[1]), found[2], int(found[3])))
    return tuple(actions)
