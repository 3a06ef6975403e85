"""What each algorithm of each collective sends, among ranks with equal links.

`n_bytes` is what a rank holds of the whole: its buffer in all-reduce and all-to-all,
the result in all-gather, the input in reduce-scatter. (These are the sizes that
nccl-tests prints.) Adding up what arrives is not counted.
"""

import math
from typing import NamedTuple

from labkit.config.checks import require_choice, require_whole
from labkit.parallel.communication.cluster import Link

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")


class Form(NamedTuple):
    """Messages that a rank sends one after another, and its bytes over all of them."""

    n_messages: float

    share: float
    """Bytes that a rank sends, over `n_bytes`."""

    def seconds(self, link: Link, n_bytes: float) -> float:
        """Return alpha times messages plus beta times bytes."""
        return link.seconds(self.share * n_bytes, n_messages=self.n_messages)


def algorithms(collective: str) -> tuple[str, ...]:
    """Return how a collective can be done, the usual way first.

    The hierarchical way uses that links inside a node differ from those between nodes.

    >>> algorithms("all_reduce")
    ('ring', 'tree', 'hierarchical')

    Raises:
        ValueError: no such collective.
    """
    require_choice({"collective": collective}, COLLECTIVES)
    return {
        "all_reduce": ("ring", "tree", "hierarchical"),
        "all_to_all": ("direct", "hierarchical"),
        "send": ("direct",),
    }.get(collective, ("ring", "hierarchical"))


def form(collective: str, n_ranks: int = 2, *, algorithm: str | None = None) -> Form:
    """Return what a rank sends in a collective.

    - Ring all-gather and reduce-scatter: p - 1 messages of n / p (Thakur, Rabenseifner
      and Gropp 2005).
    - Ring all-reduce: one after the other of these, which no algorithm undercuts in
      bytes (Patarasuk and Yuan 2009).
    - Tree all-reduce: up and down two binary trees, each with half of the data and with
      leaves where the other has inner ranks, in pieces so small that levels overlap:
      2 ceil(log2 p) messages, 2 n (Sanders, Speck and Träff 2009).
    - Direct all-to-all, with each other rank in turn: p - 1 messages of n / p (Thakur
      et al., for long messages).
    - Send: one message (Hockney 1994), whatever `n_ranks`.

    Args:
        collective: one of `COLLECTIVES`.
        n_ranks: that take part.
        algorithm: one of `algorithms(collective)` except the hierarchical; None takes
            the usual.

    >>> form("all_reduce", 4)
    Form(n_messages=6, share=1.5)
    >>> form("all_reduce", 1024, algorithm="tree")
    Form(n_messages=20, share=2)

    Raises:
        ValueError: no such collective, or it has no such algorithm.
    """
    flat = [each for each in algorithms(collective) if each != "hierarchical"]
    require_choice({"algorithm": algorithm or flat[0]}, flat)
    require_whole({"n_ranks": n_ranks})
    if collective == "send":
        return Form(1, 1)
    if n_ranks == 1:
        return Form(0, 0)
    if algorithm == "tree":
        return Form(2 * math.ceil(math.log2(n_ranks)), 2)
    times = passes(collective)
    return Form(times * (n_ranks - 1), times * (n_ranks - 1) / n_ranks)


def passes(collective: str) -> int:
    """Return how often a collective passes over the data: all-reduce twice."""
    return 2 if collective == "all_reduce" else 1
