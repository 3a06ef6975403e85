"""The absorbed form of a small model, for one new token of one sequence on a CPU.

A single token costs operations and the reading of weights, not arithmetic. This form
has the same result from fewer operations: W_UK goes into W_UQ and W_UV into W_O
(DeepSeek-V2, section 2.1.2), the gain of attention's norm into the matrix that reads
it, and matrices that read the same vector become one. It bypasses the model's modules
and computes in FP32, in which products of one row are quickest to start; it shares
the weights it does not change with an FP32 model, and copies those of a BF16 one.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.config import MLAConfig, ModelConfig
from labkit.model.attention import MLA
from labkit.model.attention_core import attend_shared
from labkit.model.cache import LatentCache, LayerView
from labkit.model.experts import Experts
from labkit.model.linear import Linear, RowProduct
from labkit.model.mlp import MLP
from labkit.model.moe import MoE, Router
from labkit.model.norm import RMSNorm, unit_vector
from labkit.model.transformer import Block, MTPModule, Transformer

PLAIN_BLOCKS = {Transformer, Block, MTPModule, nn.ModuleList}
PLAIN_LAYERS = {MLA, MLP, MoE, Router, Experts, RMSNorm, Linear, nn.Embedding}

MOST_GROWTH = 2.0
"""Most that absorbed weights may take, as a multiple of those they replace: for wide
models they are several times larger, and the modules themselves are faster."""

MOST_COPIED_PARAMS = 1 << 26
"""Largest BF16 model that is worth copying: 256 MiB in FP32."""


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
    cfg, weight = model.cfg, model.embed.weight
    if not isinstance(cfg.attention, MLAConfig) or not weight.is_cpu:
        return False
    is_shared = weight.dtype == torch.float32
    is_copied = weight.dtype == torch.bfloat16 and cfg.n_params() <= MOST_COPIED_PARAMS
    is_worth_it = growth(cfg) <= MOST_GROWTH and (is_shared or is_copied)
    modules = list(model.modules())
    is_plain = (PLAIN_BLOCKS | PLAIN_LAYERS).issuperset(map(type, modules))
    is_watched = any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    is_mixed = torch.is_autocast_enabled("cpu")
    return is_worth_it and is_plain and not is_watched and not is_mixed


class AbsorbedModel:
    """A model that reads one token of one sequence; measured 1.7 times as fast.

    Its weights are those of the model when it was built.
    """

    @torch.no_grad()
    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.eps = model.cfg.norm_eps
        self.gain = model.norm.weight.float()
        self.head = RowProduct(model.head.weight)
        identity = torch.eye(model.cfg.attention.rope_dim)
        self.basis = torch.view_as_complex(identity.unflatten(1, (-1, 2)))
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
        # A rotation is linear: its matrix holds what becomes of the basis vectors.
        turned = self.basis * model.turns(window.positions)
        rotation = torch.view_as_real(turned).flatten(1)  # (p, p)
        x = model.embed(token)[0].float()
        for index, (attention, feed_forward) in enumerate(self.halves):
            x = x + attention(x, rotation, window.layer(index))
            x = feed_forward(x)
        window.commit()
        normed = unit_vector(x, self.eps).mul_(self.gain)
        return self.head(normed).unsqueeze(0)


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
            self.query = RowProduct(q * attn.q_norm.weight)
            q = attn.wq_a.weight
        self.down = RowProduct(torch.cat((q, attn.wkv_a.weight)) * norm.weight)
        self.latent_gain = attn.kv_norm.weight.float()
        out = attn.wo.weight.unflatten(1, (mla.n_heads, -1)).double()  # (d, h, u)
        self.out = RowProduct(torch.einsum("dhu,huc->dhc", out, up_v).flatten(1))
        self.scale = attn.softmax_scale
        self.key_widths = [mla.kv_lora_rank, mla.qk_rope_head_dim]
        self.down_widths = [len(q), *self.key_widths]

    def __call__(
        self, x: Float[Tensor, "1 d"], rotation: Float[Tensor, "p p"], cache: LayerView
    ) -> Float[Tensor, "1 d"]:
        down = self.down(unit_vector(x, self.eps))
        q, latent, k_pe = down.split_with_sizes(self.down_widths, dim=1)
        if self.query is not None:
            q = self.query(unit_vector(q, self.eps))
        q = q.view(self.mla.n_heads, -1)  # (h, w)
        q_latent, q_pe = q.split_with_sizes(self.key_widths, dim=1)
        turned = torch.cat((q_pe, k_pe)).mm(rotation)  # (h + 1, p)
        latent = unit_vector(latent, self.eps).mul_(self.latent_gain)
        entries = cache.extend(torch.cat((latent, turned[-1:]), dim=1).unsqueeze(0))
        q = torch.cat((q_latent, turned[:-1]), dim=1).unsqueeze(0)
        mixed = attend_shared(q, entries.type_as(q), scale=self.scale)  # (1, h, w)
        return self.out(mixed[..., : latent.shape[1]].reshape(1, -1))


class _FeedForward:
    """Norm, experts and residual of one layer; all products of a row are alike.

    A shared expert is one that every token visits, with weight 1, and so is a dense
    network.
    """

    def __init__(self, norm: RMSNorm, ffn: MLP | MoE) -> None:
        self.eps, self.gain = norm.eps, norm.weight.float()
        self.router, always, experts = None, ffn, []
        n_always = 1
        if isinstance(ffn, MoE):
            self.router, self.gate = ffn.gate, RowProduct(ffn.gate.weight)
            experts = list(zip(ffn.experts.w13, ffn.experts.w2, strict=True))
            always, n_always = ffn.shared_experts, ffn.gate.moe.n_shared_experts
        if always is not None:
            w1, w3 = (w.weight.chunk(n_always) for w in (always.w1, always.w3))
            w13 = [torch.cat(both) for both in zip(w1, w3, strict=True)]
            experts += zip(w13, always.w2.weight.chunk(n_always, dim=1), strict=True)
        self.always = list(range(len(experts) - n_always, len(experts)))
        self.w13 = [RowProduct(w13) for w13, _ in experts]
        self.w2 = [RowProduct(w2) for _, w2 in experts]

    def __call__(self, x: Float[Tensor, "1 d"]) -> Float[Tensor, "1 d"]:
        h = unit_vector(x, self.eps).mul_(self.gain)
        visited, weights = self.always, None
        if self.router is not None:
            weights, chosen, _ = self.router.route(self.gate(h))
            weights = F.pad(weights, (0, len(self.always)), value=1.0)
            visited = chosen[0].tolist() + visited
        gate, up = torch.cat([self.w13[e](h) for e in visited]).chunk(2, dim=1)
        hidden = F.silu(gate).mul_(up)
        rows = (hidden if weights is None else hidden.mul_(weights.T)).split(1)
        out = [self.w2[e](row) for e, row in zip(visited, rows, strict=True)]
        return torch.cat((x, *out)).sum(dim=0, keepdim=True)
