"""The checks of tokens and positions that the model's functions share."""

import operator

import torch
from jaxtyping import Shaped
from torch import Tensor

from labkit.config import ModelConfig

TOKEN_DTYPES = (torch.int64, torch.int32)


def as_whole(value: object) -> int | None:
    """Return the whole number that `value` is, or None: 2.0 is none.

    >>> as_whole(2), as_whole(torch.tensor(2)), as_whole(2.0)
    (2, 2, None)
    """
    try:
        return operator.index(value)
    except TypeError:
        return None


def require_tokens(tokens: Shaped[Tensor, "..."]) -> None:
    """Raise ValueError unless there are sequences of tokens; values are not read."""
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
    if tokens.dtype not in TOKEN_DTYPES:
        raise ValueError(
            f"tokens must be int64 or int32; got {tokens.dtype}. "
            "Convert them with tokens.long()."
        )


def require_positions(n_positions: int, cfg: ModelConfig) -> None:
    """Raise ValueError if sequences, cached tokens included, are too long."""
    if n_positions > cfg.max_seq_len:
        raise ValueError(
            "sequences must be at most max_seq_len long, cached tokens included; got "
            f"{n_positions} positions, and max_seq_len={cfg.max_seq_len}. Shorten "
            f"them, or set max_seq_len={n_positions} or more in the model's config."
        )
