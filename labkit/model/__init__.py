"""The complete DeepSeek-V2/V3 architecture; it knows nothing of processes.

Of FP8 it knows storage alone: that of checkpoints, and of a cache's rows.

Letters in shapes: b batch, s new tokens, t all tokens (keys), n tokens of a flat
batch, d residual width, h heads, r rotary pairs, c latent width, w cache width,
e experts, k chosen experts, f expert width, p (token, choice) pairs, v vocabulary,
l layers or routers.
"""

from labkit.model.cache import LatentCache
from labkit.model.checkpoint import load_hf, save_hf
from labkit.model.generate import Generation, generate
from labkit.model.transformer import LossParts, Transformer

__all__ = [
    "Generation",
    "LatentCache",
    "LossParts",
    "Transformer",
    "generate",
    "load_hf",
    "save_hf",
]
