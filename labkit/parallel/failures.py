"""Which rank failed first, and how that reads.

One rank fails, and the others fail after it: their connections close, or they wait in
vain. The error is about the first; what followed is named in a line each.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

ECHOES = re.compile(
    "closed by peer|reset by peer|broken pipe|connection refused|timed out waiting|"
    "timeout|failed to pass monitoredbarrier|connectfullmesh|socketpool|"
    "failed to recv|failed to send",
    re.IGNORECASE,
)
"""What communication says when it is another rank that failed."""

LONGEST = 240
"""Characters of what a rank did; the traceback has them all."""

RANKING = ("killed", "left", "raised", "unsendable", "aborted", "hung", "echo")
"""Kinds of failure: one further left is not caused by one further right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank ended."""

    rank: int

    kind: str
    """One of `RANKING`. "killed" is by a signal; "left" is sys.exit or os._exit;
    "unsendable" a result that cannot be sent; "aborted" a C++ library's abort, as gloo
    does when messages do not fit; "echo" an error of communication."""

    what: str
    """What it did, as in "raised ValueError: no such expert"."""

    seconds: float = float("inf")
    """When, on the clock of this machine; infinity if the rank could not say."""

    trace: str = ""
    """Where it was, the innermost call last."""

    step: int | None = None
    """The step that `labkit.parallel.group.at_step` announced last."""

    printed: str = ""
    """The last lines that the rank printed."""

    log: str | None = None
    """The file with all that it printed, if it is kept."""

    @property
    def line(self) -> str:
        """The failure in a line."""
        return f"rank {self.rank} {self.words}"

    @property
    def words(self) -> str:
        """What it did, shortened, and when."""
        what = shorten(self.what, LONGEST, placeholder=" …")
        return what if self.step is None else f"{what} (at step {self.step})"


class RankFailed(RuntimeError):
    """A rank raised, was killed, left, or hung; the other ranks have been ended.

    Attributes:
        first: the failure that came first; `.rank`, `.kind`, `.step`, `.trace`.
        others: what is known of the other ranks, most of which followed.
        n_procs: how many ranks there were.
    """

    def __init__(
        self, first: Failure, others: Sequence[Failure] = (), n_procs: int = 1
    ) -> None:
        super().__init__(first, others, n_procs)
        self.first, self.others, self.n_procs = first, tuple(others), n_procs

    @property
    def rank(self) -> int:
        """The rank that failed first."""
        return self.first.rank

    def __str__(self) -> str:
        first = self.first
        parts = [f"rank {first.rank} of {self.n_procs} {first.words}"]
        if first.trace:
            parts.append(first.trace.rstrip())
        if first.printed:
            parts.append(f"Last printed by rank {first.rank}:\n{first.printed}")
        if self.others:
            lines = "\n".join(f"  {other.line}" for other in self.others)
            parts.append(f"What followed elsewhere:\n{lines}")
        if first.log:
            parts.append(f"Its log: {first.log}")
        return "\n\n".join(parts)


def first_of(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others follow from.

    >>> first_of([Failure(rank=0, kind="echo", what="lost a peer", seconds=1.0),
    ...           Failure(rank=1, kind="raised", what="raised", seconds=2.0)]).rank
    1
    """
    return min(failures, key=lambda one: (RANKING.index(one.kind), one.seconds))
