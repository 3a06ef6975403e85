"""What tests of FP8 layers measure: gradients, their error, and what autograd keeps."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@pytest.fixture(scope="session")
def drawn() -> Callable[..., Tensor]:
    """Return a function that draws values of a normal distribution."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def gradients(drawn: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Return a function: a run's result, and gradients from a drawn one of it."""

    def differentiate(
        run: Callable[[Tensor], Tensor], x: Tensor, *others: Tensor
    ) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = run(x)
        dy = drawn(*y.shape, seed=2).type_as(y)
        return [y.detach(), *torch.autograd.grad(y, (x, *others), dy)]

    return differentiate


@pytest.fixture(scope="session")
def sqnr() -> Callable[[Tensor, Tensor], float]:
    """Return a function: the ratio of an exact signal to another's error, in dB."""

    def decibels(exact: Tensor, got: Tensor) -> float:
        return 20 * math.log10(exact.norm() / (exact - got).norm())

    return decibels


@pytest.fixture(scope="session")
def kept() -> Callable[..., list[Tensor]]:
    """Return a function: what autograd keeps of a run, each storage once."""

    def keep(
        run: Callable[[Tensor], object], x: Tensor, *known: Tensor
    ) -> list[Tensor]:
        tensors = {}

        def pack(tensor: Tensor) -> Tensor:
            tensors[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = run(x.detach().requires_grad_())
        del out
        for tensor in known:
            tensors.pop(tensor.untyped_storage().data_ptr(), None)
        return [tensor for tensor in tensors.values() if tensor.nbytes]

    return keep


@pytest.fixture(scope="session")
def kept_bytes(kept: Callable[..., list[Tensor]]) -> Callable[..., int]:
    """Return a function: the bytes that autograd keeps, without those of `known`."""

    def count(run: Callable[[Tensor], object], x: Tensor, *known: Tensor) -> int:
        return sum(t.untyped_storage().nbytes() for t in kept(run, x, *known))

    return count
