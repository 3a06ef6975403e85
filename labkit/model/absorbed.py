"""The absorbed form of a small model, for one new token of one sequence.

A single token costs operations and the reading of weights, not arithmetic. This form
has the same result from fewer operations: W_UK goes into W_UQ and W_UV into W_O
(DeepSeek-V2, section 2.1.2), the gain of attention's norm into the matrix that reads
it, and matrices that read the same vector become one. It bypasses the model's modules
and shares their remaining weights. For wide models the absorbed matrices are several
times larger than what they replace, and the modules themselves are faster.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.config import MLAConfig, ModelConfig
from labkit.model.attention import MLA
from labkit.model.cache import LatentCache, LayerView
from labkit.model.experts import Experts, gathered_experts
from labkit.model.linear import Linear, linear
from labkit.model.mlp import MLP
from labkit.model.moe import MoE, Router
from labkit.model.norm import RMSNorm, unit_vector
from labkit.model.rope import rotate
from labkit.model.transformer import Block, MTPModule, Transformer

PLAIN_BLOCKS = {Transformer, Block, MTPModule, nn.ModuleList}
PLAIN_LAYERS = {MLA, MLP, MoE, Router, Experts, RMSNorm, Linear, nn.Embedding}

MOST_GROWTH = 2.0
"""Most that absorbed weights may take, as a multiple of those they replace."""


def growth(cfg: ModelConfig) -> float:
    """Return the size of MLA's absorbed weights over that of those they replace.

    >>> from labkit.config import PRESETS
    >>> [round(growth(PRESETS[name]), 1) for name in ("small", "v2-lite-16b")]
    [1.4, 2.8]
    """
    mla = cfg.attention
    assert isinstance(mla, MLAConfig)
    q_in = cfg.dim if mla.q_lora_rank is None else mla.q_lora_rank
    plain = q_in * mla.qk_head_dim + cfg.dim * mla.v_head_dim
    plain += mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    return (q_in * mla.cache_width + cfg.dim * mla.kv_lora_rank) / plain


def can_absorb(model: Transformer) -> bool:
    """Return whether the absorbed form may stand for this model, and is worth it.

    A model that was transformed, or is watched by hooks, runs by its modules.
    """
    if not isinstance(model.cfg.attention, MLAConfig) or not model.embed.weight.is_cpu:
        return False
    modules = list(model.modules())
    is_plain = (PLAIN_BLOCKS | PLAIN_LAYERS).issuperset(map(type, modules))
    is_watched = any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    is_mixed = torch.is_autocast_enabled("cpu")
    is_small = growth(model.cfg) <= MOST_GROWTH
    return is_plain and is_small and not is_watched and not is_mixed


class AbsorbedModel:
    """A model that reads one token of one sequence; measured 1.4 times as fast.

    Its weights are those of the model when it was built.
    """

    @torch.no_grad()
    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.eps = model.cfg.norm_eps
        self.identity = torch.eye(model.cfg.attention.rope_dim)[None, None]
        self.halves = [
            (
                _Attention(layer.attn_norm, layer.attn),
                _FeedForward(layer.ffn_norm, layer.ffn),
            )
            for layer in model.layers
        ]

    def __call__(
        self, token: Int[Tensor, "1 1"], cache: LatentCache
    ) -> Float[Tensor, "1 1 v"]:
        """Return the logits after the token, as the model does."""
        model = self.model
        window = cache.reserve(1, 1)
        # Rotating is linear: its matrix is what becomes of the identity.
        rotation = rotate(self.identity, model.turns(window.positions))[0, 0]
        x = model.embed(token)[0]
        for index, (attention, feed_forward) in enumerate(self.halves):
            x = x + attention(x, rotation, window.layer(index))
            x = feed_forward(x)
        window.commit()
        normed = unit_vector(x, self.eps).mul_(model.norm.weight)
        return linear(normed, model.head.weight).unsqueeze(0)


class _Attention:
    """Norm and attention of one layer, as two products around the core, or three."""

    def __init__(self, norm: RMSNorm, attn: MLA) -> None:
        mla = self.mla = attn.mla
        self.eps = norm.eps
        up = attn.wkv_b.weight.unflatten(0, (mla.n_heads, -1)).double()
        up_k, up_v = up.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=1)
        q_layer = attn.wq if mla.q_lora_rank is None else attn.wq_b
        q = q_layer.weight.unflatten(0, (mla.n_heads, -1)).double()  # (h, n + p, i)
        q_nope, q_pe = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=1)
        q = torch.cat((up_k.mT @ q_nope, q_pe), dim=1).flatten(0, 1)  # (h·w, i)
        self.query = None
        if mla.q_lora_rank is not None:
            self.query = (q * attn.q_norm.weight).type_as(attn.wq_b.weight)
            q = attn.wq_a.weight
        down = torch.cat((q, attn.wkv_a.weight)) * norm.weight
        self.down = down.type_as(attn.wkv_a.weight)
        self.latent_gain = attn.kv_norm.weight
        out = attn.wo.weight.unflatten(1, (mla.n_heads, -1)).double()  # (d, h, u)
        out = torch.einsum("dhu,huc->dhc", out, up_v).flatten(1)
        self.out = out.type_as(attn.wo.weight)
        self.scale = attn.softmax_scale
        self.key_widths = [mla.kv_lora_rank, mla.qk_rope_head_dim]
        self.down_widths = [len(q), *self.key_widths]

    def __call__(
        self, x: Float[Tensor, "1 d"], rotation: Float[Tensor, "p p"], cache: LayerView
    ) -> Float[Tensor, "1 d"]:
        down = linear(unit_vector(x, self.eps), self.down)
        q, latent, k_pe = down.split_with_sizes(self.down_widths, dim=1)
        if self.query is not None:
            q = linear(unit_vector(q, self.eps), self.query)
        q = q.view(self.mla.n_heads, -1)  # (h, w)
        q_latent, q_pe = q.split_with_sizes(self.key_widths, dim=1)
        turned = torch.cat((q_pe, k_pe)).float().mm(rotation).type_as(q)  # (h + 1, p)
        latent = unit_vector(latent, self.eps).mul_(self.latent_gain)
        entries = cache.extend(torch.cat((latent, turned[-1:]), dim=1).unsqueeze(0))
        q = torch.cat((q_latent, turned[:-1]), dim=1)[None, None]
        shared = entries.type_as(q)[None]
        mixed = F.scaled_dot_product_attention(q, shared, shared, scale=self.scale)
        return linear(mixed[..., : latent.shape[1]].reshape(1, -1), self.out)


class _FeedForward:
    """Norm and feed-forward network of one layer, with its residual."""

    def __init__(self, norm: RMSNorm, ffn: MLP | MoE) -> None:
        self.eps, self.gain = norm.eps, norm.weight
        self.moe = ffn if isinstance(ffn, MoE) else None
        self.dense = ffn.shared_experts if isinstance(ffn, MoE) else ffn
        if self.dense is not None:
            self.w13 = torch.cat((self.dense.w1.weight, self.dense.w3.weight))

    def __call__(self, x: Float[Tensor, "1 d"]) -> Float[Tensor, "1 d"]:
        h = unit_vector(x, self.eps).mul_(self.gain)
        if self.dense is not None:
            gate, up = linear(h, self.w13).chunk(2, dim=1)
            x = x + linear(F.silu(gate).mul_(up), self.dense.w2.weight)
        if self.moe is not None:
            router, experts = self.moe.gate, self.moe.experts
            logits = linear(h.float(), router.weight.float())
            weights, chosen, _ = router.route(logits)
            weights = weights.type_as(h)
            x = x + gathered_experts(h, weights, chosen, experts.w13, experts.w2)
        return x
