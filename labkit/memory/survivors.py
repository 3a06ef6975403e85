"""Storages that outlived the step that made them, and who holds each of them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.autograd.graph import Node

from labkit.memory.births import Birth, BirthCount
from labkit.memory.graphs import saved_tensors
from labkit.memory.holders import NOBODY, Holder, find_holders

GRADIENT = Holder("its parameter", is_bounded=True)


class Survivor(NamedTuple):
    """A storage that outlived its step, and who holds it."""

    birth: Birth
    holder: Holder
    is_in_graph: bool
    """Whether only autograd holds it, for a result that the holder has."""


def find_survivors(
    count: BirthCount,
    old: Mapping[int, Birth],
    model: nn.Module,
    pool: Sequence[object],
) -> list[Survivor]:
    """Return who holds each of the storages that live.

    A parameter holds its gradient, which is one: that is bounded.

    Args:
        count: numbers the storages.
        old: those to look for.
        model: names its parts.
        pool: all objects, as from `gc.get_objects()`.
    """
    tensors = tensors_in(pool)
    gradients = [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    found = {
        number: Survivor(old[number], GRADIENT, False)
        for number in map(count.number_of, gradients)
        if number in old
    }
    held = [x for x in tensors if x.grad_fn is not None or count.number_of(x) in old]
    holders = zip(held, find_holders(held, model, pool), strict=True)
    # A graph keeps tensors, too, that nobody else holds.
    named = [(tensor, holder) for tensor, holder in holders if holder is not NOBODY]
    # Of several holders, one that lets go by itself counts least.
    named.sort(key=lambda pair: pair[1].is_bounded)
    for tensor, holder in named:
        number = count.number_of(tensor)
        if number in old:
            found.setdefault(number, Survivor(old[number], holder, False))
    for number, holder in _held_by_graphs(count, old.keys() - found.keys(), named):
        found[number] = Survivor(old[number], holder, True)
    for number in old.keys() - found.keys():
        found[number] = Survivor(old[number], NOBODY, False)
    return list(found.values())


def _held_by_graphs(
    count: BirthCount,
    missing: set[int],
    named: Sequence[tuple[Shaped[Tensor, "..."], Holder]],
) -> list[tuple[int, Holder]]:
    """Return what the graphs of held results keep, each for the first result."""
    found, seen = [], set[Node]()
    for result, holder in named:
        if missing and result.grad_fn is not None:
            for saved in saved_tensors(result.grad_fn, seen):
                number = count.number_of(saved) or 0
                if number in missing:
                    missing = missing - {number}
                    found.append((number, holder))
    return found


def tensors_in(pool: Sequence[object]) -> list[Shaped[Tensor, "..."]]:
    """Return the tensors among objects, those of sparse layouts left out."""
    tensors = (x for x in pool if issubclass(type(x), Tensor))
    return [x for x in tensors if x.layout == torch.strided]
