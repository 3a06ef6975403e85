"""A model cut over ranks: who holds what, who does what when, and what it costs.

Placements of experts, timelines of pipelines and costs of collectives
(`labkit.parallel.communication`) are pure functions of a few numbers. `launch` runs a
function in several processes, in which `parallelize` cuts a model over a `Mesh`.
"""

from typing import TYPE_CHECKING, Any

from labkit.parallel.balance import balance_experts
from labkit.parallel.failures import RankFailed
from labkit.parallel.launch import launch
from labkit.parallel.mesh import Mesh
from labkit.parallel.moves import Moves, moves, settle
from labkit.parallel.pipeline import Timeline, Times, pipeline_timeline
from labkit.parallel.placement import Placement, contiguous

if TYPE_CHECKING:
    from labkit.parallel.model import Parallel, parallelize

__all__ = [
    "Mesh",
    "Moves",
    "Parallel",
    "Placement",
    "RankFailed",
    "Timeline",
    "Times",
    "balance_experts",
    "contiguous",
    "launch",
    "moves",
    "parallelize",
    "pipeline_timeline",
    "settle",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import what cuts a model when it is first asked for.

    PyTorch's shards and pipelines take two seconds to import, and arithmetic has no
    use for them.
    """
    if name not in ("Parallel", "parallelize"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from labkit.parallel import model

    return getattr(model, name)
