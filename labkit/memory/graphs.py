"""What autograd's graph holds, which no reference of Python's leads to."""

from collections.abc import Iterator

from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.graph import Node


def saved_tensors(root: Node, seen: set[Node]) -> Iterator[Shaped[Tensor, "..."]]:
    """Yield the tensors that a graph's nodes have saved and not yet given back.

    Args:
        root: where the graph begins, as in `loss.grad_fn`.
        seen: nodes to leave out; those that are visited join them.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> [saved.shape for saved in saved_tensors(x.exp().sum().grad_fn, set())]
    [torch.Size([3])]
    """
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
        yield from _saved_by(node)


def _saved_by(node: Node) -> Iterator[Shaped[Tensor, "..."]]:
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in ["saved_tensors", *names]:
        try:
            value = getattr(node, name, None)
        except RuntimeError:
            continue  # the backward has run, and given it back
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Tensor):
                yield item
