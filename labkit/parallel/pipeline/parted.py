"""The second part of a parted backward pass, where a weight is read in many places.

PyTorch notes, in the first part, where gradients of weights branch off, and goes on
from there in the second, group by group: weights that branch off together, and all
nodes where they do. A weight that is read in two places, one behind the other, belongs
to two groups, as the embedding does that each of several MTP modules reads. PyTorch
2.13 then runs both groups, and counts that weight twice; and the first one frees what
the second needs.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.pipelining._backward import stage_backward_weight

Group = dict[str, Any]
"""`params`, a set of nodes; `intermediates`, where they branch off; `grads` there."""


def has_shared_weights(groups: Iterable[Group]) -> bool:
    """Return whether a weight branches off in several places."""
    return any(len(group["intermediates"]) > 1 for group in groups)


def accumulate(parameters: Iterable[nn.Parameter], groups: Iterable[Group]) -> None:
    """Add up the gradients of weights, those of shared ones once."""
    stage_backward_weight(iter(parameters), _joined(groups), retain_graph=True)


def _joined(groups: Iterable[Group]) -> list[Group]:
    """Return groups without a weight in common."""
    joined: list[tuple[set, dict]] = []
    for group in groups:
        params = set(group["params"])
        grads = dict(zip(group["intermediates"], group["grads"], strict=True))
        for other in [each for each in joined if each[0] & params]:
            joined.remove(other)
            params, grads = other[0] | params, other[1] | grads
        joined.append((params, grads))
    return [
        {"params": params, "intermediates": list(grads), "grads": list(grads.values())}
        for params, grads in joined
    ]
