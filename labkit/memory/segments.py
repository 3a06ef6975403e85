"""A tape in brief, so that equal layers are priced once: for tapes of many layers.

Played back, a run of operators starts with all of its storages and ends with all of its
gradients. What a tape of several runs needs at the fullest instant of one of them is
what that run needs then, with the storages of all before it and the gradients of all
after it.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

from labkit.memory.playback import fullest_instant, gradient_bytes, kept_by_part
from labkit.memory.tape import Op


class Parts(NamedTuple):
    """Bytes of the parts that come and go while a tape is played."""

    activations: int = 0
    logits: int = 0
    dispatch: int = 0
    gradients: int = 0
    temporaries: int = 0

    def plus(self, other: "Parts") -> "Parts":
        """Return the sums, part by part."""
        return Parts(*map(add, self, other))

    def minus(self, other: "Parts") -> "Parts":
        """Return the differences, part by part."""
        return Parts(*map(sub, self, other))

    def times(self, n: int) -> "Parts":
        """Return so many of these."""
        return Parts(*[n * n_bytes for n_bytes in self])


def sums(parts: Sequence[Parts]) -> Parts:
    """Return the sums of many, part by part."""
    return Parts(*map(sum, zip(*parts, strict=True)))


class Segment(NamedTuple):
    """What a run of operators keeps, and how many bytes live while it is played."""

    kept: Parts
    """At the end of its forward."""

    before: Parts
    """Before its backward begins: also what waits for it already."""

    fullest: Parts
    """When most live at once."""

    after: int
    """Of gradients, when its backward has ended."""

    n_before: int
    """Sum of `before`, worked out once for the many chains that it may be part of."""

    n_fullest: int
    """Sum of `fullest`."""

    @classmethod
    def of(cls, kept: Parts, before: Parts, fullest: Parts, after: int) -> "Segment":
        """Return a run with its sums."""
        return cls(kept, before, fullest, after, sum(before), sum(fullest))

    def owing(self, debt: Parts) -> "Segment":
        """Return a run that keeps less, and has all back when its backward begins."""
        kept, before = self.kept.minus(debt), self.before.minus(debt)
        return Segment.of(kept, before, self.fullest, self.after)


def segment(
    ops: Sequence[Op], *, has_gradients: bool = False, has_buffer: bool = False
) -> Segment:
    """Return a tape in brief.

    Args:
        ops: of the forward pass, in its order.
        has_gradients: as for `fullest_instant`.
        has_buffer: as for `fullest_instant`.
    """
    kept = Parts(**kept_by_part(ops))
    gradients = 0 if has_buffer else gradient_bytes(ops)
    waiting = sum([op.early_bytes for op in ops])
    held = gradients if has_gradients else 0
    fullest = fullest_instant(ops, has_gradients=has_gradients, has_buffer=has_buffer)
    return Segment.of(
        kept,
        kept.plus(Parts(temporaries=waiting, gradients=held)),
        Parts(**fullest),
        gradients,
    )


def chain(segments: Sequence[Segment]) -> Segment:
    """Return runs in the order of the forward as one.

    >>> layer = segment([Op("", gradient_bytes=5, working_bytes=2)])
    >>> chain([layer] * 3).fullest
    Parts(activations=0, logits=0, dispatch=0, gradients=15, temporaries=2)
    """
    kept, before, fullest, after, n_before, n_fullest = zip(*segments, strict=True)
    # At the fullest instant of each: what lives of all runs.
    n_before = [0, *accumulate(n_before)]
    n_after = [0, *accumulate(after)]
    live = [
        n_before[index] + n_own + n_after[-1] - n_after[index + 1]
        for index, n_own in enumerate(n_fullest)
    ]
    most = live.index(max(live))
    gradients = Parts(gradients=n_after[-1] - n_after[most + 1])
    at_most = sums((*before[:most], fullest[most], gradients))
    return Segment.of(sums(kept), sums(before), at_most, n_after[-1])
