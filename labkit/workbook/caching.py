"""What the notebook on attention measures: one decoding step, and a prompt's FLOPs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from labkit.config import ModelConfig
from labkit.model import LatentCache, Transformer


def filled_cache(
    cfg: ModelConfig, n_tokens: int, *, n_free: int = 1, seed: int = 0
) -> LatentCache:
    """Return an FP32 cache of one sequence that holds `n_tokens` of noise.

    A step takes the same time whatever the rows hold, and no prompt has to be read.

    Args:
        cfg: the model.
        n_tokens: tokens held.
        n_free: tokens that there is still room for.
        seed: of the noise.
    """
    cache = LatentCache(cfg, 1, n_tokens + n_free, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(n_tokens).unsqueeze(0)
    for layer in range(cfg.n_layers):
        shape = (1, n_tokens, cfg.attention.cache_width)
        cache.update(layer, torch.randn(shape, generator=generator), positions)
    return cache


def decode_step(
    model: Transformer, cache: LatentCache
) -> Callable[[], Float[Tensor, "1 1 v"]]:
    """Return a run that decodes one token after those the cache holds.

    It forgets the token again, so that every run meets the same context.
    """
    token = torch.zeros(1, 1, dtype=torch.int64)
    lengths = cache.lengths

    def run() -> Float[Tensor, "1 1 v"]:
        with torch.inference_mode():
            logits = model(token, cache)
        cache.rewind(lengths)
        return logits

    return run


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFlops:
    """FLOPs of reading a prompt without a cache."""

    linear: int
    """Of linear layers: each token for itself."""

    pairs: int
    """Of scores and weighted values: each token with those before it."""


def read_prompt(model: Transformer, n_tokens: int) -> None:
    """Run the model over a prompt of `n_tokens`."""
    with torch.inference_mode():
        model(torch.zeros(1, n_tokens, dtype=torch.int64))


def count_prompt(model: Transformer, n_tokens: int) -> PromptFlops:
    """Read a prompt on the CPU, counting FLOPs operator by operator.

    The attention core computes blocks of 128 queries, so some pairs on the diagonal are
    computed, and counted, although they are hidden.
    """
    counter = FlopCounterMode(display=False)
    with counter:
        read_prompt(model, n_tokens)
    counts = counter.get_flop_counts()["Global"]
    pairs = counts[torch.ops.aten.bmm] + counts[torch.ops.aten.baddbmm]
    return PromptFlops(linear=counter.get_total_flops() - pairs, pairs=pairs)
