"""A model cut over ranks: who holds what, who does what when, and what it costs.

Placements of experts, timelines of pipelines and costs of collectives
(`labkit.parallel.communication`) are pure functions of a few numbers.
"""

from labkit.parallel.balance import balance_experts
from labkit.parallel.moves import Moves, moves, settle
from labkit.parallel.pipeline import Timeline, Times, pipeline_timeline
from labkit.parallel.placement import Placement, contiguous

__all__ = [
    "Moves",
    "Placement",
    "Timeline",
    "Times",
    "balance_experts",
    "contiguous",
    "moves",
    "pipeline_timeline",
    "settle",
]
