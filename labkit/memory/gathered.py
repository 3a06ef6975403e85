"""Weights that ZeRO 3 shares out, while ranks gather them to compute.

One block is gathered at a time and let go after it, and the next one while it computes;
what lies outside of blocks is gathered throughout. So does PyTorch's FSDP, with each
block and the model sharded; a test compares the bytes.
"""

from typing import NamedTuple

from labkit.config import Layout, ModelConfig
from labkit.memory.persistent import States, part_bytes
from labkit.memory.shards import Shards, shard_params
from labkit.memory.stages import Chunk, Stage


class Gathered(NamedTuple):
    """Bytes of gathered weights; what each rank holds for itself is not among them."""

    outside: int = 0
    """Of embedding, head, final norm, and what MTP modules have beside their block:
    from the beginning of the forward to the end of the backward."""

    blocks: int = 0
    """Of the two neighbours that are largest together: one computes, one arrives."""


def gathered_weights(
    cfg: ModelConfig, layout: Layout, stage: Stage, states: States
) -> Gathered:
    """Return what a rank of a stage gathers, once its weights are shared out.

    >>> from labkit.config import PRESETS
    >>> from labkit.memory.persistent import STATES
    >>> from labkit.memory.stages import stage_layers
    >>> v3, layout = PRESETS["v3-671b"], Layout(pp=16, dp=128, ep=64)
    >>> middle = stage_layers(v3, layout)[1]
    >>> gathered = gathered_weights(v3, layout, middle, STATES["deepseek-v3"])
    >>> f"{gathered.blocks / 2**30:.2f} GiB, and {gathered.outside} bytes"
    '1.52 GiB, and 0 bytes'
    """
    contents = stage.contents(cfg)
    total = _weights(shard_params(cfg, layout, stage), states)
    n_mtp, is_sparse = contents.n_mtp, cfg.moe is not None
    n_dense = contents.n_dense + (0 if is_sparse else n_mtp)
    n_sparse = contents.n_sparse + (n_mtp if is_sparse else 0)
    sizes: list[int] = []
    # A layer that is not there is dense if it comes first, and else sparse.
    for n, is_dense in ((n_sparse, False), (n_dense, True)):
        if n:
            layers = range(1) if is_dense else range(cfg.n_layers, cfg.n_layers + 1)
            one = Stage(chunks=(Chunk(layers=layers),), n_copies=stage.n_copies)
            size = _weights(shard_params(cfg, layout, one), states)
            total -= n * size
            sizes += [size] * min(n, 2)
    return Gathered(outside=total, blocks=sum(sorted(sizes)[-2:]))


def _weights(shards: Shards, states: States) -> int:
    """Return the bytes of the weights that other ranks hold too."""
    return sum(
        part_bytes("weights", bucket, states)
        for bucket in shards.buckets
        if bucket.n_holders > 1
    )
