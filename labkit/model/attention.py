"""Attention layers of equal interface: multi-head latent, and grouped-query.

MLA keeps one latent vector and one rotary key per token, which all heads share
(DeepSeek-V2, section 2.1). Training expands the latent into keys and values per
head; decoding instead *absorbs* the expansion into the query and the output, and
attends over the latents as they lie in the cache. Both are the same function.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn

from labkit.config import GQAConfig, MLAConfig, ModelConfig
from labkit.model.attention_core import attend, attend_shared
from labkit.model.linear import Linear
from labkit.model.norm import RMSNorm, compute_dtype
from labkit.model.rope import rotate


@runtime_checkable
class LayerCache(Protocol):
    """What an attention layer needs of a cache: its own rows, and who sees them."""

    @property
    def mask(self) -> Bool[Tensor, "b s t"] | None:
        """True where a new token sees a cached one; None when that is causal."""
        ...

    def extend(self, entries: Float[Tensor, "b s w"]) -> Float[Tensor, "b t w"]:
        """Store the new tokens' entries; return those of all tokens so far."""
        ...


class MLA(nn.Module):
    """Multi-head latent attention (DeepSeek-V3, equations 1 to 11)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        mla = cfg.attention
        assert isinstance(mla, MLAConfig)
        self.mla = mla
        self.softmax_scale = cfg.softmax_scale
        query_width = mla.n_heads * mla.qk_head_dim
        if mla.q_lora_rank is None:
            self.wq = Linear(cfg.dim, query_width)
        else:
            self.wq_a = Linear(cfg.dim, mla.q_lora_rank)
            self.q_norm = RMSNorm(mla.q_lora_rank, eps=cfg.norm_eps)
            self.wq_b = Linear(mla.q_lora_rank, query_width)
        self.wkv_a = Linear(cfg.dim, mla.cache_width)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, eps=cfg.norm_eps)
        up_width = mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.wkv_b = Linear(mla.kv_lora_rank, up_width)
        self.wo = Linear(mla.n_heads * mla.v_head_dim, cfg.dim)

    def forward(
        self,
        x: Float[Tensor, "b s d"],
        turns: Complex[Tensor, "*b s r"],
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "b s d"]:
        q_nope, q_pe = self.queries(x, turns)
        latent, k_pe = self.latents(x, turns)
        if cache is None:
            out = self.expanded(q_nope, q_pe, latent, k_pe)
            return self.wo(out.flatten(-2))
        entries = cache.extend(torch.cat((latent, k_pe), dim=-1)).type_as(latent)
        if self._is_absorbed(x.shape[1], entries.shape[1]):
            out = self.absorbed(q_nope, q_pe, entries, cache.mask)
        else:
            latent, k_pe = self._split_entries(entries)
            out = self.expanded(q_nope, q_pe, latent, k_pe, cache.mask)
        return self.wo(out.flatten(-2))

    def _is_absorbed(self, n_queries: int, n_keys: int) -> bool:
        # A single query sees all keys without a mask only in the absorbed form.
        return n_queries == 1 or absorbed_flops(
            self.mla, n_queries, n_keys
        ) <= expanded_flops(self.mla, n_queries, n_keys)

    def queries(
        self, x: Float[Tensor, "b s d"], turns: Complex[Tensor, "*b s r"]
    ) -> tuple[Float[Tensor, "b s h n"], Float[Tensor, "b s h p"]]:
        """Return each head's query: the part without, and the part with, RoPE."""
        if self.mla.q_lora_rank is None:
            return self.split_queries(self.wq(x), turns)
        return self.split_queries(self.wq_b(self.q_norm(self.wq_a(x))), turns)

    def split_queries(
        self, q: Float[Tensor, "b s w"], turns: Complex[Tensor, "*b s r"]
    ) -> tuple[Float[Tensor, "b s h n"], Float[Tensor, "b s h p"]]:
        """Return the two parts of each head's query, the second one rotated."""
        q = q.unflatten(-1, (self.mla.n_heads, -1))
        widths = [self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim]
        q_nope, q_pe = q.split(widths, dim=-1)
        return q_nope, rotate(q_pe, turns)

    def latents(
        self, x: Float[Tensor, "b s d"], turns: Complex[Tensor, "*b s r"]
    ) -> tuple[Float[Tensor, "b s c"], Float[Tensor, "b s p"]]:
        """Return what the cache keeps: the normed latent and the rotated key."""
        return self.split_latents(self.wkv_a(x), turns)

    def split_latents(
        self, entries: Float[Tensor, "b s w"], turns: Complex[Tensor, "*b s r"]
    ) -> tuple[Float[Tensor, "b s c"], Float[Tensor, "b s p"]]:
        """Return the latent of projected tokens, normed, and their key, rotated."""
        latent, k_pe = self._split_entries(entries)
        return self.kv_norm(latent), rotate(k_pe.unsqueeze(-2), turns).squeeze(-2)

    def expanded(
        self,
        q_nope: Float[Tensor, "b s h n"],
        q_pe: Float[Tensor, "b s h p"],
        latent: Float[Tensor, "b t c"],
        k_pe: Float[Tensor, "b t p"],
        mask: Bool[Tensor, "b s t"] | None = None,
    ) -> Float[Tensor, "b s h u"]:
        """Return each head's output, with keys and values expanded per head."""
        q, k, v = self.per_head(q_nope, q_pe, latent, k_pe)
        out = attend(q, k, v, scale=self.softmax_scale, mask=mask)
        return out.transpose(1, 2)

    def per_head(
        self,
        q_nope: Float[Tensor, "b s h n"],
        q_pe: Float[Tensor, "b s h p"],
        latent: Float[Tensor, "b t c"],
        k_pe: Float[Tensor, "b t p"],
    ) -> tuple[
        Float[Tensor, "b h s q"], Float[Tensor, "b h t q"], Float[Tensor, "b h t u"]
    ]:
        """Return the queries, keys and values of each head."""
        mla = self.mla
        kv = self.wkv_b(latent).unflatten(-1, (mla.n_heads, -1))
        k_nope, v = kv.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        shared = k_pe.unsqueeze(1).expand(-1, mla.n_heads, -1, -1)
        # Heads go before positions here, where the parts are copied anyway.
        q = torch.cat((q_nope.transpose(1, 2), q_pe.transpose(1, 2)), dim=-1)
        k = torch.cat((k_nope.transpose(1, 2), shared), dim=-1)
        return q, k, v.transpose(1, 2)

    def absorbed(
        self,
        q_nope: Float[Tensor, "b s h n"],
        q_pe: Float[Tensor, "b s h p"],
        entries: Float[Tensor, "b t w"],
        mask: Bool[Tensor, "b s t"] | None = None,
    ) -> Float[Tensor, "b s h u"]:
        """Return each head's output, attending over latents as the cache has them.

        score = q·(W_UK c) = (W_UKᵀ q)·c, and Σ p (W_UV c) = W_UV (Σ p c).
        """
        batch, seq_len, n_heads, nope = q_nope.shape
        weight = self.wkv_b.weight.to(compute_dtype(q_nope))
        up = weight.unflatten(0, (n_heads, -1))  # (h, n + u, c)
        up_k, up_v = up.split([nope, self.mla.v_head_dim], dim=1)
        q_latent = torch.bmm(q_nope.flatten(0, 1).transpose(0, 1), up_k)  # (h, bs, c)
        q_latent = q_latent.transpose(0, 1).unflatten(0, (batch, seq_len))
        q = torch.cat((q_latent, q_pe), dim=-1).flatten(1, 2)  # (b, s·h, w)
        if mask is None and seq_len > 1:
            mask = causal_mask(seq_len, entries.shape[1], device=q.device)
        if mask is not None:
            mask = mask.unsqueeze(2).expand(-1, -1, n_heads, -1).flatten(1, 2)
        # All heads share keys and values, so heads are rows of queries to the kernel.
        mixed = attend_shared(q, entries, scale=self.softmax_scale, mask=mask)
        mixed = mixed[..., : self.mla.kv_lora_rank]
        mixed = mixed.unflatten(1, (seq_len, n_heads)).flatten(0, 1)  # (bs, h, c)
        out = torch.bmm(mixed.transpose(0, 1), up_v.transpose(1, 2))  # (h, bs, u)
        return out.transpose(0, 1).unflatten(0, (batch, seq_len))

    def _split_entries(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        widths = [self.mla.kv_lora_rank, self.mla.qk_rope_head_dim]
        latent, k_pe = entries.split(widths, dim=-1)
        return latent, k_pe


class GQA(nn.Module):
    """Grouped-query attention; with as many KV heads as heads, plain MHA."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        gqa = cfg.attention
        assert isinstance(gqa, GQAConfig)
        self.gqa = gqa
        self.softmax_scale = cfg.softmax_scale
        kv_width = gqa.n_kv_heads * gqa.head_dim
        self.wq = Linear(cfg.dim, gqa.n_heads * gqa.head_dim)
        self.wk = Linear(cfg.dim, kv_width)
        self.wv = Linear(cfg.dim, kv_width)
        self.wo = Linear(gqa.n_heads * gqa.head_dim, cfg.dim)

    def forward(
        self,
        x: Float[Tensor, "b s d"],
        turns: Complex[Tensor, "*b s r"],
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "b s d"]:
        heads = (-1, self.gqa.head_dim)
        q = rotate(self.wq(x).unflatten(-1, heads), turns)
        k = rotate(self.wk(x).unflatten(-1, heads), turns)
        v = self.wv(x).unflatten(-1, heads)
        mask = None
        if cache is not None:
            new = torch.cat((k.flatten(-2), v.flatten(-2)), dim=-1)
            stored = cache.extend(new).type_as(q)
            k, v = (part.unflatten(-1, heads) for part in stored.chunk(2, dim=-1))
            mask = cache.mask
        if mask is None and x.shape[1] < k.shape[1]:
            mask = causal_mask(x.shape[1], k.shape[1], device=x.device)
            mask = mask.expand(len(x), -1, -1)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = attend(q, k, v, scale=self.softmax_scale, mask=mask)
        return self.wo(out.transpose(1, 2).flatten(-2))


def causal_mask(
    n_queries: int, n_keys: int, *, device: torch.device
) -> Bool[Tensor, "1 s t"]:
    """Return True where one of the last `n_queries` tokens sees a key."""
    visible = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    return visible.tril(n_keys - n_queries).unsqueeze(0)


def expanded_flops(mla: MLAConfig, n_queries: int, n_keys: int) -> int:
    """Return FLOPs per layer to expand all keys and values, then attend."""
    up = 2 * n_keys * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    pairs = 2 * n_queries * n_keys * (mla.qk_head_dim + mla.v_head_dim)
    return mla.n_heads * (up + pairs)


def absorbed_flops(mla: MLAConfig, n_queries: int, n_keys: int) -> int:
    """Return FLOPs per layer to attend over latents with an absorbed expansion.

    >>> v3 = MLAConfig(n_heads=128, q_lora_rank=1536)
    >>> per_pair = absorbed_flops(v3, 1, 10**6) / expanded_flops(v3, 10**6, 1)
    >>> round(per_pair, 1)
    3.4
    """
    up = 2 * n_queries * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    pairs = 2 * n_queries * n_keys * (mla.cache_width + mla.kv_lora_rank)
    return mla.n_heads * (up + pairs)


def build_attention(cfg: ModelConfig) -> MLA | GQA:
    """Return the attention layer that the config asks for."""
    return MLA(cfg) if isinstance(cfg.attention, MLAConfig) else GQA(cfg)
