"""The checks of tokens, positions and dtypes that the model's functions share."""

import operator

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from labkit.config import ModelConfig

TOKEN_DTYPES = (torch.int64, torch.int32)

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

IGNORED = -100
"""Target of a position that has none, as in PyTorch's cross-entropy."""


def as_whole(value: object) -> int | None:
    """Return the whole number that `value` is, or None: 2.0 and True are none.

    >>> as_whole(2), as_whole(torch.tensor(2)), as_whole(2.0), as_whole(True)
    (2, 2, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def has_values(tensor: Shaped[Tensor, "..."]) -> bool:
    """Return whether a tensor has values to read: neither on meta, nor fake.

    >>> has_values(torch.zeros(1)), has_values(torch.zeros(1, device="meta"))
    (True, False)
    """
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def require_tokens(tokens: Shaped[Tensor, "..."]) -> None:
    """Raise ValueError unless there are sequences of tokens; values are not read."""
    _require_tensor("tokens", tokens)
    shape = tuple(tokens.shape)
    if len(shape) != 2:
        raise ValueError(
            "tokens must have two dimensions, sequences and their tokens; got shape "
            f"{shape}. Pass one sequence as tokens[None]."
        )
    if 0 in shape:
        raise ValueError(
            f"tokens must hold at least one sequence of one token; got shape {shape}. "
            "Start from a separator token if there is no text."
        )
    _require_whole_numbers("tokens", tokens)


def require_targets(targets: Shaped[Tensor, "..."], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless there is one target per token; values are not read."""
    _require_tensor("targets", targets)
    if targets.shape != shape:
        raise ValueError(
            "targets must have the shape of tokens, one for each; got "
            f"{tuple(targets.shape)} for tokens of shape {tuple(shape)}. Take both "
            "from one sequence: its tokens but the last, and its tokens but the first."
        )
    _require_whole_numbers("targets", targets)


def require_vocabulary(tokens: Int[Tensor, "..."], vocab_size: int) -> None:
    """Raise ValueError unless all tokens are of the vocabulary: values are read."""
    _require_within("tokens", tokens, vocab_size, "padding too")


def require_target_vocabulary(targets: Int[Tensor, "..."], vocab_size: int) -> None:
    """Raise ValueError unless all targets are tokens or none: values are read."""
    wanted = targets[targets != IGNORED]
    _require_within("targets", wanted, vocab_size, f"or be {IGNORED} where none is")


def require_weight_dtype(dtype: torch.dtype | None) -> None:
    """Raise ValueError unless a model computes with weights of this dtype."""
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ValueError(
            "dtype must be one that weights are computed in; got "
            f"{dtype!r}. Use one of {', '.join(map(str, WEIGHT_DTYPES))}."
        )


def require_positions(n_positions: int, cfg: ModelConfig) -> None:
    """Raise ValueError if sequences, cached tokens included, are too long."""
    if n_positions > cfg.max_seq_len:
        raise ValueError(
            "sequences must be at most max_seq_len long, cached tokens included; got "
            f"{n_positions} positions, and max_seq_len={cfg.max_seq_len}. Shorten "
            f"them, or set max_seq_len={n_positions} or more in the model's config."
        )


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} must be a tensor of whole numbers; got a "
            f"{type(value).__name__}. Convert them with torch.tensor({name})."
        )


def _require_whole_numbers(name: str, values: Shaped[Tensor, "..."]) -> None:
    if values.dtype not in TOKEN_DTYPES:
        raise ValueError(
            f"{name} must be int64 or int32; got {values.dtype}. "
            f"Convert them with {name}.long()."
        )


def _require_within(
    name: str, values: Int[Tensor, "..."], vocab_size: int, note: str
) -> None:
    if values.numel() == 0:
        return
    lowest, highest = (int(end) for end in values.aminmax())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{name} must lie between 0 and {vocab_size - 1}, {note}; got "
            f"{lowest if lowest < 0 else highest}. Encode the text for this model's "
            f"vocabulary of {vocab_size}."
        )
