"""The tape of one rank: tensor parallelism with sequence parallelism, and experts'.

Between matrices that are cut by width, tokens are: so all that a module keeps is
divided, but what each rank computes whole. The number of rows is already the rank's
own. Nothing here has been compared with a run.
"""

from collections.abc import Iterable, Iterator

from labkit.config import Layout, MoEConfig
from labkit.memory.published import routed_rows
from labkit.memory.tape import Kept, Op

WHOLE = ("wq_a", "wkv_a", "gate")
"""Matrices that each tensor-parallel rank has whole; the gains of norms are so too."""


def rows_to_plan(
    moe: MoEConfig,
    n_tokens: int,
    layout: Layout,
    *,
    routing: str = "physical",
    imbalance: float = 1.0,
) -> float:
    """Return `Pass.n_rows` for a tape that `rank_tape` is to divide.

    Args:
        moe: the experts.
        n_tokens: of the micro-batch.
        layout: degrees of parallelism.
        routing: as for `routed_rows`.
        imbalance: as for `routed_rows`.

    >>> moe = MoEConfig(n_routed_experts=256, n_activated_experts=8, moe_inter_dim=1)
    >>> rows_to_plan(moe, 4096, Layout(dp=32, tp=2, ep=8))
    32768.0
    """
    rows = routed_rows(moe, n_tokens, layout, routing=routing, imbalance=imbalance)
    return rows * layout.tp


def rank_tape(ops: Iterable[Op], layout: Layout) -> Iterator[Op]:
    """Yield the same operators as one rank of the layout runs them."""
    tp = layout.tp
    for op in ops:
        name = op.module.rpartition(".")[2]
        n_cuts = layout.ep if name == "experts" else tp
        if name in WHOLE or name.endswith("norm"):
            n_cuts = 1
        if n_cuts == tp == 1:
            yield op
            continue
        yield Op(
            op.module,
            tuple([_on_rank(storage, tp, n_cuts) for storage in op.kept]),
            _part(op.gradient_bytes, n_cuts),
            _part(op.working_bytes, tp),
            _part(op.early_bytes, tp),
            op.parameter,
        )


def _on_rank(storage: Kept, tp: int, n_cuts: int) -> Kept:
    what, n_bytes, part, is_split = storage
    n_parts = n_cuts if part == "casts" else tp if is_split else 1
    return Kept(what, _part(n_bytes, n_parts), part, is_split)


def _part(n_bytes: int, n_parts: int) -> int:
    return -(-n_bytes // n_parts)
