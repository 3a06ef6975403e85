"""A model cut over ranks: who holds what, who does what when, and what it costs.

Placements of experts are pure functions of counts.
"""

from labkit.parallel.balance import balance_experts
from labkit.parallel.moves import Moves, moves, settle
from labkit.parallel.placement import Placement, contiguous

__all__ = [
    "Moves",
    "Placement",
    "balance_experts",
    "contiguous",
    "moves",
    "settle",
]
