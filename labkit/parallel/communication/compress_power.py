"""Gradients of matrices as products of two thin ones: PowerSGD (arXiv 1905.13727).

With M the sum over ranks of an m x n gradient, and Q of the step before, n x r:

    P = M Q, summed over ranks, and made orthonormal
    Q = M' P, summed over ranks
    M ~ P Q'

Each is one step of a power iteration that goes on from step to step. It takes two
all-reduces of r (m + n) values instead of one of m n; the sum of products is the
product of sums, so that unlike narrow numbers these can be added on their way.

The second cannot begin before the first has ended. PyTorch's `powerSGD_hook` waits for
it in a callback, and hangs with several buckets on gloo; see `compress`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from labkit.config.checks import require_whole
from labkit.parallel.communication.compress import Rounds, Sent, Shapes, finite
from labkit.parallel.communication.forms import form


class Matrices(NamedTuple):
    """A parameter as a stack of matrices."""

    count: int
    n_rows: int
    n_columns: int


@dataclass(slots=True, eq=False)
class PowerSGD:
    """Sums in which every matrix has a low rank; what has none is sent as it is."""

    rank: int = 4

    error_feedback: bool = True
    """Whether what the product does not say is added to the next step's gradient."""

    warm_start: bool = True
    """Whether Q of a step is the start of the next; else it is drawn anew."""

    seed: int = 0
    """Of the Q that are drawn, alike on all ranks."""

    rest: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False)
    """What is not yet sent, by parameter."""

    start: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False)
    """The Q of each parameter."""

    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_whole({"rank": self.rank})
        self._generator = torch.Generator().manual_seed(self.seed)

    @property
    def name(self) -> str:
        """The rank, and whether errors are forgotten."""
        feedback = "" if self.error_feedback else ", no feedback"
        return f"PowerSGD rank {self.rank}{feedback}"

    def sum(
        self,
        flat: Float[Tensor, " n"],
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
    ) -> Rounds:
        """Sum a bucket over ranks; it is overwritten on the way."""
        pieces = flat.split([parameter.numel() for parameter in parameters])
        thin, whole = [], []
        for parameter, piece in zip(parameters, pieces, strict=True):
            shape = matrices(tuple(parameter.shape), self.rank)
            if shape is None:
                whole.append(piece)
                continue
            if parameter in self.rest:
                piece += self.rest[parameter]
            thin.append((parameter, piece.view(shape)))
        ps = [matrix @ self._start(key, matrix) for key, matrix in thin]
        message = _pack(ps + whole)
        yield dist.all_reduce(message, group=group, async_op=True)
        _unpack(message, ps + whole)
        ps = [_orthonormal(p) for p in ps]
        qs = [m.mT @ p for (_, m), p in zip(thin, ps, strict=True)]
        if self.error_feedback:
            for (key, m), p, q in zip(thin, ps, qs, strict=True):
                self.rest[key] = finite((m - p @ q.mT).flatten())
        message = _pack(qs)
        if thin:
            yield dist.all_reduce(message, group=group, async_op=True)
        _unpack(message, qs)
        for (key, m), p, q in zip(thin, ps, qs, strict=True):
            m.copy_(p @ q.mT)
            self.start[key] = q
        return flat

    def expected(self, shapes: Shapes, n_ranks: int) -> Sent:
        """Return what a rank sends for a bucket of parameters of these shapes.

        >>> PowerSGD(rank=4).expected([(512, 512), (512,)], n_ranks=2)
        Sent(n_messages=4, n_bytes=18432.0)
        """
        first = second = 0
        for shape in shapes:
            found = matrices(shape, self.rank)
            if found is None:
                first += prod(shape)
                continue
            first += self.rank * found.count * found.n_rows
            second += self.rank * found.count * found.n_columns
        usual = form("all_reduce", n_ranks)
        n_messages = usual.n_messages * (2 if second else 1)
        return Sent(n_messages, usual.share * 4 * (first + second))

    @property
    def state_bytes(self) -> int:
        """Bytes kept from step to step: of matrices 4 a value, and their Q."""
        kept = [*self.rest.values(), *self.start.values()]
        return sum(tensor.numel() * 4 for tensor in kept)

    def _start(self, key: object, matrix: Tensor) -> Tensor:
        """Return Q to begin with, which all ranks agree on without a word."""
        count, _, n_columns = matrix.shape
        known = self.start.get(key) if self.warm_start else None
        if known is None:
            known = matrix.new_zeros(count, n_columns, self.rank)
        # A step that overflowed, or in which an expert had no tokens, left none.
        is_good = known.isfinite().all(dim=(1, 2)) & known.ne(0).any(dim=(1, 2))
        if is_good.all():
            return known
        drawn = torch.randn(count, n_columns, self.rank, generator=self._generator)
        drawn = _orthonormal(drawn.to(matrix.device))
        return torch.where(is_good[:, None, None], known, drawn)


def matrices(shape: tuple[int, ...], rank: int) -> Matrices | None:
    """Return the matrices that a parameter consists of, if a low rank makes them less.

    Experts are a stack of matrices, each with a product of its own.

    >>> matrices((8, 64, 32), rank=4)
    Matrices(count=8, n_rows=64, n_columns=32)
    >>> matrices((64,), rank=4) is None
    True
    """
    if len(shape) < 2:
        return None
    *stack, n_rows, n_columns = shape
    if rank * (n_rows + n_columns) >= n_rows * n_columns:
        return None
    return Matrices(prod(stack), n_rows, n_columns)


def _orthonormal(p: Float[Tensor, "b m r"]) -> Float[Tensor, "b m r"]:
    """Return an orthonormal basis of the columns; what is not finite stays so."""
    if not p.isfinite().all():
        return torch.full_like(p, torch.nan)
    return torch.linalg.qr(p).Q


def _pack(tensors: Sequence[Tensor]) -> Float[Tensor, " n"]:
    return torch.cat([tensor.flatten() for tensor in tensors] or [torch.empty(0)])


def _unpack(message: Float[Tensor, " n"], tensors: Sequence[Tensor]) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, piece in zip(tensors, message.split(sizes), strict=True):
        tensor.copy_(piece.view_as(tensor))
