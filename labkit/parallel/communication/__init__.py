"""What ranks send each other, and what that takes."""

from labkit.parallel.communication.cluster import Cluster, Link, cluster
from labkit.parallel.communication.cost import (
    Cost,
    all_gather,
    all_reduce,
    all_to_all,
    quickest,
    reduce_scatter,
    send,
)
from labkit.parallel.communication.dispatch import expert_dispatch
from labkit.parallel.communication.fit import Fit, fit
from labkit.parallel.communication.forms import COLLECTIVES, Form, algorithms, form

__all__ = [
    "COLLECTIVES",
    "Cluster",
    "Cost",
    "Fit",
    "Form",
    "Link",
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "cluster",
    "expert_dispatch",
    "fit",
    "form",
    "quickest",
    "reduce_scatter",
    "send",
]
