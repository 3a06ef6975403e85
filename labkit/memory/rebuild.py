"""Functions whose tensors autograd does not keep, but rebuilds in the backward pass.

`torch.utils.checkpoint` keeps a function's inputs and rebuilds what autograd saved
inside it; what the function returns is still kept, by the operators that read it.
`rebuilt` gives back results that are not kept either: as long as they are read within
`discarding`, the run that rebuilds the inside rebuilds them too, once for all readers.
So a cheap function between two products costs its inputs alone, and the products are
not run again.

Functions must be deterministic: the state of random numbers is not restored. Autocast
is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")
Results = TypeVar("Results", Tensor, tuple[Tensor, ...])


class _Origin:
    """A call whose results can be had again, and their readers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._n_readers = 0
        self._n_waiting = 0
        self._results: tuple[Tensor, ...] = ()

    def add_reader(self) -> None:
        self._n_readers += 1

    def read(self, index: int) -> Tensor:
        """Return a result to one reader; the last of a backward pass leaves none."""
        if not self._n_waiting:
            self._results = self._node.saved_tensors  # here the function runs again
            self._n_waiting = self._n_readers
        result = self._results[index]
        self._n_waiting -= 1
        if not self._n_waiting:
            self._results = ()
        return result


class _Source(NamedTuple):
    """What a storage is the result of."""

    origin: _Origin
    index: int
    dtype: torch.dtype


class _View(NamedTuple):
    """Stands for a saved tensor: a view of a result that is not there yet."""

    source: _Source
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        result = self.source.origin.read(self.source.index)
        return result.as_strided(self.size, self.stride, self.offset)


def checkpointed(
    function: Callable[..., Result], *inputs: object, **named: object
) -> Result:
    """Return the function's result, of which autograd keeps the inputs alone.

    Without gradients it is a plain call.
    """
    if not torch.is_grad_enabled():
        return function(*inputs, **named)
    return checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=False, **named
    )


def rebuilt(
    function: Callable[..., Results], *inputs: Shaped[Tensor, "..."]
) -> Results:
    """Return the function's results, which are not kept for readers in `discarding`.

    Args:
        function: its results must not share storage with its inputs, and nobody may
            write to them.
        inputs: kept, unless they are themselves results of `rebuilt`.

    >>> x = torch.randn(8, 8, requires_grad=True)
    >>> with discarding():
    ...     loss = rebuilt(torch.exp, x).square().sum()
    >>> loss.backward()
    >>> torch.allclose(x.grad, 2 * torch.exp(2 * x))
    True
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    results, marker = checkpointed(_with_marker, function, *inputs)
    if marker.grad_fn is not None:
        origin = _Origin(marker.grad_fn)
        for index, result in enumerate(_as_tuple(results)):
            storage = result.untyped_storage()
            assert all(x.untyped_storage() is not storage for x in inputs)
            # On the storage, which operators share whose views are saved. It ends when
            # the result does, and no later storage can be taken for it.
            storage.rebuilt_from = _Source(origin, index, result.dtype)
    return results


def _with_marker(
    function: Callable[..., Results], *inputs: Tensor
) -> tuple[Results, Tensor]:
    results = function(*inputs)
    return results, _Marker.apply(*_as_tuple(results))


class _Marker(torch.autograd.Function):
    """Saves tensors and is never run backward: its node hands them out again."""

    @staticmethod
    def forward(ctx: FunctionCtx, *results: Tensor) -> Tensor:
        ctx.save_for_backward(*results)
        return results[0].new_empty(0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> None:
        raise AssertionError("a marker leads to no loss")


def _as_tuple(results: Any) -> tuple[Tensor, ...]:  # noqa: ANN401, one or several
    return results if isinstance(results, tuple) else (results,)


def discarding() -> saved_tensors_hooks:
    """Return a context in which operators do not keep results of `rebuilt`.

    Hooks around it see all other tensors that are saved within.
    """
    # PyTorch asks the innermost hooks only, and has no public name for the next.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    outer_pack, outer_unpack = outer or (_detached, _unchanged)
    return saved_tensors_hooks(
        partial(_pack, outer=outer_pack), partial(_unpack, outer=outer_unpack)
    )


def _pack(tensor: Tensor, outer: Callable[[Tensor], Any]) -> object:
    source = getattr(tensor.untyped_storage(), "rebuilt_from", None)
    if source is None or source.dtype != tensor.dtype:
        return outer(tensor)
    source.origin.add_reader()
    return _View(source, tensor.shape, tensor.stride(), tensor.storage_offset())


def _unpack(packed: object, outer: Callable[[Any], Tensor]) -> Tensor:
    return packed.read() if isinstance(packed, _View) else outer(packed)


def _detached(tensor: Tensor) -> Tensor:
    # A result that its own operator keeps would hold itself, and never be freed.
    return tensor.detach()


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
