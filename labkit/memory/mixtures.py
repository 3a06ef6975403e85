"""The cheapest mixture of policies within a limit: a search that knows no model.

Blocks stand in a row. Each has a few choices, with a price and three numbers of bytes.
Played back, the backward of a block finds all that the blocks before it keep, so the
fullest instant is the most, over blocks, of

    kept by those before + the block's own fullest + gradients of those after.

So mixtures are built from the front, and two that end at the same block can be told
apart by few numbers: the worse in all of them is dropped. What is left in the end holds
the cheapest mixture, unless so many are left on the way that some are thinned out.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MOST_KEPT = 400
"""Mixtures of a row that are followed at a time."""


class Choice(NamedTuple):
    """A block under one policy; a choice may be that of several blocks in a row."""

    policies: tuple[str, ...]
    cost: float
    kept: int
    """Bytes that live until its backward begins."""

    held: int
    """Of these and others, bytes that live at the end of the forward."""

    fullest: int
    """Bytes of its own when most of them live."""

    after: int
    """Bytes of gradients that its backward leaves."""


class Mixture(NamedTuple):
    """Choices for the first blocks of a row, or for all of them."""

    cost: float
    kept: int
    other: int
    """Bytes held at the end of the forward if a limit was given, else the fullest."""

    policies: tuple[str, ...]


Row = Sequence[Sequence[Choice]]


def mixtures(row: Row, *, limit: int | None = None) -> list[Mixture]:
    """Return mixtures of a row of which none is worse than another in all.

    Args:
        row: the choices of each block.
        limit: most bytes at any instant of the backward; None tells mixtures apart by
            their fullest instant instead.
    """
    found = [Mixture(0.0, 0, 0, ())]
    later = sum(choices[0].after for choices in row)
    for choices in row:
        later -= choices[0].after
        found = thinned(undominated(_extended(found, choices, later, limit)))
    return found


def _extended(
    found: Iterable[Mixture], choices: Sequence[Choice], later: int, limit: int | None
) -> Iterator[Mixture]:
    for cost, kept, other, policies in found:
        for choice in choices:
            most = kept + choice.fullest + later
            if limit is None:
                new = max(other, most)
            elif most <= limit:
                new = other + choice.held
            else:
                continue
            yield Mixture(
                cost + choice.cost, kept + choice.kept, new, policies + choice.policies
            )


def undominated(found: Iterable[Mixture]) -> list[Mixture]:
    """Return the mixtures that no other equals or beats in price and bytes.

    >>> best = Mixture(1.0, 4, 4, ("full",))
    >>> undominated([Mixture(1.0, 4, 5, ("moe",)), best]) == [best]
    True
    """
    left: list[Mixture] = []
    stairs: list[tuple[int, int]] = []  # kept rises, other falls
    for mixture in sorted(found):
        step = mixture.kept, mixture.other
        index = bisect_left(stairs, (mixture.kept + 1,))
        if index and stairs[index - 1][1] <= mixture.other:
            continue  # cheaper before, and no more bytes of either kind
        left.append(mixture)
        end = index = bisect_left(stairs, (mixture.kept,))
        while end < len(stairs) and stairs[end][1] >= mixture.other:
            end += 1
        del stairs[index:end]
        insort(stairs, step)
    return left


def thinned(found: list[Mixture]) -> list[Mixture]:
    """Return no more than `MOST_KEPT`, evenly spread over prices, both ends included.

    >>> few = thinned([Mixture(price, -price, 0, ()) for price in range(10_000)])
    >>> len(few), few[0].cost, few[-1].cost
    (400, 0, 9999)
    """
    if len(found) <= MOST_KEPT:
        return found
    last = len(found) - 1
    return [found[index * last // (MOST_KEPT - 1)] for index in range(MOST_KEPT)]


class Chunk(NamedTuple):
    """A row as it lies on a rank that several micro-batches are on their way to."""

    row: Row
    n_kept: int
    """Micro-batches that it keeps."""

    waiting: int
    """Bytes of other gradients while its backward runs."""

    @property
    def plain(self) -> "Chunk":
        """The same with the first choices alone."""
        return self._replace(row=[choices[:1] for choices in self.row])


def piled(chunks: Iterable[Chunk]) -> list[Mixture]:
    """Return mixtures of all rows of a rank, one after the other.

    Here `kept` is that of all micro-batches, and `other` is how much more lives at the
    fullest instant.
    """
    found = [Mixture(0.0, 0, 0, ())]
    for chunk in chunks:
        rows = mixtures(chunk.row)
        pairs = (
            Mixture(
                before.cost + own.cost,
                before.kept + chunk.n_kept * own.kept,
                max(before.other, own.other - own.kept + chunk.waiting),
                before.policies + own.policies,
            )
            for before in found
            for own in rows
        )
        found = thinned(undominated(pairs))
    return found
