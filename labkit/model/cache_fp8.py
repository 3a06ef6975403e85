"""Rows of a cache in FP8, 656 bytes per token and layer for DeepSeek-V3.

The layout is the one that FlashMLA publishes: the latent in E4M3, then one FP32 scale
for every 128 of its values, then the rotary key in BF16, which turns with the position
and is not quantized. A scale maps the largest magnitude of its tile to 448.

What is stored follows from the tokens, however they were cut into chunks, as closely
as sums do that are taken in another order. In FP32 these move scales in their last
bits, and one or two values in a thousand to the FP8 number beside them: logits were
seen to differ by up to 0.04 %, where FP8 itself moves them by 2 to 4 % and more.

Run on CPUs only so far, and not on a GPU.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from labkit.config import AttentionConfig, MLAConfig
from labkit.config.counts import CACHE_TILE, fp8_row_bytes

LARGEST = torch.finfo(torch.float8_e4m3fn).max

LEAST = 1e-12
"""Magnitude below which a tile counts as zero; its scale must not be 0."""


class Fp8Rows:
    """What turns rows of values into bytes, each value once, and bytes into values.

    >>> rows = Fp8Rows(MLAConfig(n_heads=128, q_lora_rank=1536))
    >>> rows.n_bytes, rows.encode(torch.ones(1, 2, 576)).shape
    (656, torch.Size([1, 2, 656]))

    Raises:
        ValueError: the attention has no latent.
    """

    def __init__(
        self, mla: AttentionConfig, *, device: torch.device | str | None = None
    ) -> None:
        self.n_bytes = fp8_row_bytes(mla)
        assert isinstance(mla, MLAConfig)
        key_bytes = 2 * mla.qk_rope_head_dim
        scale_bytes = self.n_bytes - mla.kv_lora_rank - key_bytes
        self._sizes = [mla.kv_lora_rank, scale_bytes, key_bytes]
        codes = torch.arange(256, dtype=torch.uint8, device=device)
        self._table = codes.view(torch.float8_e4m3fn).float()

    def encode(self, entries: Float[Tensor, "b s w"]) -> UInt8[Tensor, "b s bytes"]:
        """Return the rows as they are stored.

        A tile that holds an infinity or NaN is NaN when it is read again.
        """
        latent_width = self._sizes[0]
        # Upcast first: dividing in BF16 would round twice.
        tiles = entries[..., :latent_width].float().split(CACHE_TILE, dim=-1)
        scales = [
            tile.abs().amax(-1, keepdim=True).clamp_min(LEAST) / LARGEST
            for tile in tiles
        ]
        values = [
            (tile / scale).to(torch.float8_e4m3fn)
            for tile, scale in zip(tiles, scales, strict=True)
        ]
        key = entries[..., latent_width:].to(torch.bfloat16).contiguous()
        parts = [part.view(torch.uint8) for part in (*values, *scales, key)]
        return torch.cat(parts, dim=-1)

    def decode(
        self, rows: UInt8[Tensor, "b t bytes"], dtype: torch.dtype
    ) -> Float[Tensor, "b t w"]:
        """Return the latents and keys that stored rows stand for, rounded to `dtype`.

        Products of values and scales are those of FP32.
        """
        values, scales, key = self.parts(rows)
        # A table of 256 numbers: a third of the time of a CPU's cast from FP8.
        codes = values.view(torch.uint8).int()
        latent = self._table.index_select(0, codes.flatten()).view(codes.shape)
        tiles = latent.split(CACHE_TILE, dim=-1)
        for tile, scale in zip(tiles, scales.split(1, dim=-1), strict=True):
            tile.mul_(scale)
        return torch.cat((latent, key), dim=-1).to(dtype)

    def parts(
        self, rows: UInt8[Tensor, "b t bytes"]
    ) -> tuple[
        Float[Tensor, "b t c"], Float[Tensor, "b t tiles"], Float[Tensor, "b t key"]
    ]:
        """Return the E4M3 values, a view; and copies of FP32 scales and BF16 key.

        Copies, because in rows of any width they need not begin where a number may.
        """
        values, *others = rows.split(self._sizes, dim=-1)
        scales, key = (
            part.clone(memory_format=torch.contiguous_format) for part in others
        )
        values = values.view(torch.float8_e4m3fn)
        return values, scales.view(torch.float32), key.view(torch.bfloat16)
