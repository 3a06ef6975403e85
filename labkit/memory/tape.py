"""The tape of a forward pass: what each operator keeps until its backward has run.

Autograd keeps storages, not tensors: a view keeps all of its base alive, and what two
operators keep is there once. So each storage stands on the tape once, at the operator
that keeps it first, which is the last to give it back.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from labkit.config.checks import named, require_choice, require_whole
from labkit.memory.formats import Formats

EXACT_BYTES = 4
"""Of a value that stays in FP32 whatever the precision."""

INDEX_BYTES = 8

BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward and backward pass: how many tokens, in which dtypes, and where."""

    batch: int
    """Sequences of the micro-batch."""

    seq_len: int

    weights: torch.dtype = torch.float32

    compute: torch.dtype = torch.float32
    """Of matrix products; with FP32 weights, autocast makes copies of them in it."""

    device: Literal["cpu", "gpu"] = "cpu"
    """Whose kernels run. What is said of a GPU's has not been compared with one."""

    n_rows: float | None = None
    """Rows that the routed experts of a layer compute, where their load is not given;
    None takes what even routing gives."""

    ep: int = 1
    """Ranks that experts are spread over; above 1, copies of tokens are sent to them,
    and what arrives is kept."""

    formats: Formats = Formats()
    """Of what layers keep that compute in FP8; names are relative to the model, or to
    the module whose pass this is."""

    def __post_init__(self) -> None:
        require_whole(named(self, "batch", "seq_len", "ep"))
        require_choice(named(self, "device"), ("cpu", "gpu"))
        if self.formats and self.compute != torch.bfloat16:
            raise ValueError(
                "layers in FP8 narrow what a BF16 model keeps; got products in "
                f"{self.compute}. Set precision='bf16', or cached='compute'."
            )
        if self.weights != self.compute and self.weights != torch.float32:
            raise ValueError(
                "autocast computes in a dtype narrower than the weights'; got weights "
                f"in {self.weights} and products in {self.compute}. Set "
                f"compute={self.weights}, or weights=torch.float32."
            )

    @property
    def n_tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def is_mixed(self) -> bool:
        """Whether autocast is on."""
        return self.weights != self.compute

    def within(self, module: str) -> "Pass":
        """Return the pass through a module of this one."""
        if not self.formats:
            return self
        return replace(self, formats=self.formats.within(module))

    def shorter(self, n: int) -> "Pass":
        """Return the pass over sequences `n` tokens shorter, with its share of rows."""
        seq_len = self.seq_len - n
        n_rows = None if self.n_rows is None else self.n_rows * seq_len / self.seq_len
        return replace(self, seq_len=seq_len, n_rows=n_rows)


class Kept(NamedTuple):
    """One storage that the backward waits for."""

    what: str
    n_bytes: int
    part: Literal["activations", "casts", "logits", "dispatch"] = "activations"
    """Casts are copies of weights; a report adds them to the activations. Dispatch is
    what other ranks sent."""

    is_split: bool = True
    """Whether tensor-parallel ranks hold a part each: of the width or, as in sequence
    parallelism, of the tokens. Latents are whole on each."""


class Op(NamedTuple):
    """One operator, or a few in a row that keep and give back together."""

    module: str
    """Whose forward runs it, as in `named_modules`; the loss outside all of them."""

    kept: tuple[Kept, ...] = ()
    """Storages that no operator before it kept."""

    gradient_bytes: int = 0
    """Of the gradient of a parameter that its backward makes. What later operators
    made for the same parameter is added to it, or cast into it."""

    working_bytes: int = 0
    """Most that lives only while its backward runs, or until another's reads it:
    gradients of activations, and what kernels need to compute them."""

    early_bytes: int = 0
    """Of gradients of its results that the backward makes first of all."""

    parameter: str = "weight"
    """The gradient's."""

    def beside(self, n_bytes: int) -> "Op":
        """Return the same operator while so many other bytes wait for another."""
        module, kept, gradient, working, *more = self
        return Op(module, kept, gradient, working + n_bytes, *more)

    def within(self, module: str) -> "Op":
        """Return the same operator of a module in another."""
        name = f"{module}.{self.module}" if self.module else module
        return Op(name, *self[1:])


def activation(what: str, n_values: int, dtype: torch.dtype, **more: bool) -> Kept:
    """Return a kept storage of so many values."""
    return Kept(what, n_values * dtype.itemsize, **more)


def linear(
    step: Pass,
    module: str,
    widths: tuple[int, int],
    *,
    kept: Iterable[Kept] = (),
    beside: int = 0,
) -> Iterator[Op]:
    """Yield a linear layer; autocast first makes a copy of its weight, and keeps it.

    In FP8 it quantizes the weight itself instead, and its gradient is whole at once.

    Args:
        step: the pass.
        module: the layer's name.
        widths: of its input and of its output.
        kept: its input, unless another operator kept it before.
        beside: bytes that wait for other operators while its backward runs.
    """
    n_weights = widths[0] * widths[1]
    gradient, copy = (n_weights * x.itemsize for x in (step.weights, step.compute))
    given, wanted = (step.n_tokens * width * step.compute.itemsize for width in widths)
    if step.formats.of(module) is not None:
        working = given + wanted + beside + fp8_copies(step, widths)
        yield Op(module, tuple(kept), gradient, working)
        return
    if step.is_mixed:
        yield Op(module, (), gradient, given + beside)
        kept = (Kept("weight", copy, "casts"), *kept)
    yield Op(module, tuple(kept), copy, given + wanted + beside)


def fp8_copies(step: Pass, widths: tuple[int, int], n_rows: int | None = None) -> int:
    """Return the bytes of what a product's backward computes with in FP8.

    That is its input in tiles of tokens, and its result's gradient in tiles of
    channels and of tokens: both products of the backward sum within a tile.

    Args:
        step: the pass.
        widths: of the input and of the result.
        n_rows: of both; None takes the tokens of the pass.
    """
    n_rows = step.n_tokens if n_rows is None else n_rows
    given, wanted = (step.formats.n_bytes("e4m3", n_rows, width) for width in widths)
    return given + 2 * wanted


def norm(
    step: Pass,
    module: str,
    width: int,
    *,
    dtype: torch.dtype,
    kept: Iterable[Kept] = (),
) -> Op:
    """Return an RMS norm, which keeps its input and each vector's inverse scale.

    On a GPU autocast computes it in FP32, from a copy unless its input is.

    Args:
        step: the pass.
        module: the norm's name.
        width: of each vector.
        dtype: of its input.
        kept: its input, unless another operator kept it before.
    """
    n, exact = step.n_tokens, torch.float32
    if step.device == "gpu" and step.is_mixed and dtype != exact:
        kept = (activation("input in FP32", n * width, exact),)
    scales = activation("inverse scales", n, exact)
    # In: the result's gradient. Out: the input's. Between: products, both in FP32,
    # and where the input is not, copies of both.
    values = step.compute.itemsize + 2 * EXACT_BYTES
    if dtype != exact:
        values += EXACT_BYTES + dtype.itemsize
    return Op(
        module,
        (*kept, scales),
        gradient_bytes=width * step.weights.itemsize,
        working_bytes=n * width * values,
    )


def shared_gradient(step: Pass, dim: int) -> int:
    """Return the bytes of a branch's gradient that are the residual stream's own.

    Autocast makes a copy of it, in the branch's dtype.
    """
    return 0 if step.is_mixed else step.n_tokens * dim * step.compute.itemsize
