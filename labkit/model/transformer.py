"""The decoder: embedding, blocks, head, multi-token prediction, and its loss."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.config.checks import require_at_least, require_whole
from labkit.model.attention import LayerCache, build_attention
from labkit.model.cache import LatentCache
from labkit.model.checks import (
    IGNORED,
    require_positions,
    require_target_vocabulary,
    require_targets,
    require_tokens,
    require_vocabulary,
    require_weight_dtype,
)
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.model.moe import MoE, Router, Routing, balance_loss, expert_load
from labkit.model.norm import RMSNorm
from labkit.model.rope import rope_amplitude, rope_frequencies, rotations


@dataclass(frozen=True, slots=True)
class LossParts:
    """The loss and its addends, in nats; `total` is what to differentiate."""

    total: Float[Tensor, ""]
    main: Float[Tensor, ""]
    """Cross-entropy of the next token."""

    mtp: Float[Tensor, ""]
    """Multi-token prediction, weight included."""

    balance: Float[Tensor, ""]
    """Sequence-wise balance, weight included."""

    load: Int[Tensor, "l e"]
    """Tokens that visited each expert, a row per router, MTP's last."""


class Block(nn.Module):
    """One pre-norm layer: attention, then a dense or a sparse network."""

    def __init__(self, cfg: ModelConfig, *, is_dense: bool) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = build_attention(cfg)
        self.ffn_norm = RMSNorm(cfg.dim, eps=cfg.norm_eps)
        if is_dense or cfg.moe is None:
            self.ffn = MLP(cfg.dim, cfg.inter_dim)
        else:
            self.ffn = MoE(cfg.dim, cfg.moe)

    def forward(
        self,
        x: Float[Tensor, "b s d"],
        turns: Complex[Tensor, "*b s r"],
        cache: LayerCache | None = None,
    ) -> tuple[Float[Tensor, "b s d"], Routing | None]:
        x = x + self.attn(self.attn_norm(x), turns, cache)
        out = self.ffn(self.ffn_norm(x))
        if isinstance(out, tuple):
            return x + out[0], out[1]
        return x + out, None


class MTPModule(nn.Module):
    """Predict one token further, from a hidden state and the next embedding.

    Embedding and head are the model's own. The projection reads [embedding; hidden],
    the order of the released weights, which is the reverse of equation 21.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.enorm = RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.hnorm = RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.eh_proj = Linear(2 * cfg.dim, cfg.dim)
        self.block = Block(cfg, is_dense=cfg.moe is None)
        self.norm = RMSNorm(cfg.dim, eps=cfg.norm_eps)

    def forward(
        self,
        hidden: Float[Tensor, "b s d"],
        embedded: Float[Tensor, "b s d"],
        turns: Complex[Tensor, "*b s r"],
        cache: LayerCache | None = None,
    ) -> tuple[Float[Tensor, "b s d"], Routing | None]:
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        return self.block(self.eh_proj(joined), turns, cache)


class Transformer(nn.Module):
    """A DeepSeek-V2/V3-class decoder.

    Args:
        cfg: the architecture.
        device: where parameters are made; "meta" makes shapes without storage.
        dtype: dtype of parameters; router biases stay FP32.
        generator: source of the initial weights; None uses PyTorch's global one.

    Raises:
        ValueError: a dtype that weights are not computed in.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        require_weight_dtype(dtype)
        self.cfg = cfg
        # No buffer: casting the model to BF16 must not round the frequencies.
        self._frequencies = rope_frequencies(cfg)
        # Built without storage, so that weights are drawn once, in one place.
        with torch.device("meta"):
            self.embed = nn.Embedding(cfg.vocab_size, cfg.dim)
            self.layers = nn.ModuleList(
                Block(cfg, is_dense=i < cfg.n_dense_layers) for i in range(cfg.n_layers)
            )
            self.norm = RMSNorm(cfg.dim, eps=cfg.norm_eps)
            self.head = Linear(cfg.dim, cfg.vocab_size)
            self.mtp = nn.ModuleList(MTPModule(cfg) for _ in range(cfg.n_mtp))
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype or parameter.dtype)
        self.to_empty(device=device or torch.get_default_device())
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: normal, std `cfg.init_std`; gains 1, biases 0."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1)
            elif isinstance(module, Router) and module.bias is not None:
                module.bias.zero_()
        for name, parameter in self.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(0, self.cfg.init_std, generator=generator)

    def forward(
        self, tokens: Int[Tensor, "b s"], cache: LatentCache | None = None
    ) -> Float[Tensor, "b s v"]:
        """Return logits; with a cache, for new tokens after those it holds.

        Raises:
            ValueError: no sequence or no token, more than `cfg.max_seq_len` positions,
                a cache that is full or another model's, or, on a CPU, a token outside
                the vocabulary. (A GPU stops at one without a sentence.)
        """
        x, _ = self.hidden(tokens, cache)
        return self.head(self.norm(x))

    def hidden(
        self, tokens: Int[Tensor, "b s"], cache: LatentCache | None = None
    ) -> tuple[Float[Tensor, "b s d"], list[Routing]]:
        """Return the last residual stream, before its norm, and the routings."""
        require_tokens(tokens)
        if cache is None:
            window, end = None, tokens.shape[1]
            positions = torch.arange(end, device=tokens.device)
        else:
            cache.require_fit(self.cfg)
            window = cache.reserve(*tokens.shape)
            positions, end = window.positions, max(window.ends)
        require_positions(end, self.cfg)
        x, turns, routings = self._embedded(tokens), self.turns(positions), []
        for index, layer in enumerate(self.layers):
            x, routing = layer(
                x, turns, None if window is None else window.layer(index)
            )
            if routing is not None:
                routings.append(routing)
        if window is not None:
            window.commit()
        return x, routings

    def turns(self, positions: Int[Tensor, "*b s"]) -> Complex[Tensor, "*b s r"]:
        """Return the rotations of RoPE at these positions."""
        frequencies = self._frequencies.to(positions.device)
        return rotations(positions, frequencies, amplitude=rope_amplitude(self.cfg))

    def loss(
        self,
        tokens: Int[Tensor, "b s"],
        targets: Int[Tensor, "b s"],
        *,
        n_tokens: int | None = None,
        n_sequences: int | None = None,
        mtp_weight: float | None = None,
    ) -> LossParts:
        """Return the training loss and its parts.

        Args:
            tokens: inputs.
            targets: the token after each input; -100 where there is none. As for
                tokens, the vocabulary's bounds are checked on a CPU.
            n_tokens: targets of the whole optimizer step, when this is one
                micro-batch of it; losses then add up to the large batch's.
            n_sequences: sequences of the whole step, likewise.
            mtp_weight: lambda (equation 25), else the config's.

        Raises:
            ValueError: targets unlike the tokens, a count below 1, a negative weight,
                or sequences that are not longer than the MTP modules are many.
        """
        require_tokens(tokens)
        require_targets(targets, tokens.shape)
        targets = targets.long()
        if n_tokens is None:
            # A tensor: nothing waits for the count, and on meta there is none.
            n_tokens = (targets != IGNORED).sum().clamp(min=1)
        else:
            require_whole({"n_tokens": n_tokens})
        if n_sequences is None:
            n_sequences = len(tokens)
        else:
            require_whole({"n_sequences": n_sequences})
        x, routings = self.hidden(tokens)
        normed = self.norm(x)
        main = self.token_loss_sum(normed, targets) / n_tokens
        deeper, mtp_routings = self.mtp_loss_sum(normed, targets)
        routings = routings + mtp_routings
        mtp = deeper * (self._mtp_weight(mtp_weight) / n_tokens)
        balance = self._balance(routings) / n_sequences
        return LossParts(
            total=main + mtp + balance,
            main=main.detach(),
            mtp=mtp.detach(),
            balance=balance.detach(),
            load=self._load(routings),
        )

    def token_loss_sum(
        self, normed: Float[Tensor, "b s d"], targets: Int[Tensor, "b s"]
    ) -> Float[Tensor, ""]:
        """Return the summed cross-entropy of the head's words on normed states."""
        return cross_entropy_sum(self.head(normed), targets)

    def mtp_loss_sum(
        self, normed: Float[Tensor, "b s d"], targets: Int[Tensor, "b s"]
    ) -> tuple[Float[Tensor, ""], list[Routing]]:
        """Return the summed cross-entropy of all MTP modules, and their routings.

        Module k sees position i and the embedding of token i + k, and predicts
        token i + k + 1 (equations 21 to 24). The last k positions have no such
        token. The hidden state is read after its norm.

        Raises:
            ValueError: sequences are not longer than the modules are many.
        """
        require_depth(targets.shape[1], len(self.mtp))
        total, routings = normed.new_zeros((), dtype=torch.float32), []
        for depth, module in enumerate(self.mtp, start=1):
            given, wanted = deeper_targets(targets, depth)
            length = given.shape[1]
            positions = torch.arange(length, device=targets.device)
            x, routing = module(
                normed[:, :length], self.embed(given), self.turns(positions)
            )
            normed = module.norm(x)
            total = total + self.token_loss_sum(normed, wanted)
            if routing is not None:
                routings.append(routing)
        return total, routings

    def routers(self) -> list[Router]:
        """Return the routers, in the order of the rows of `LossParts.load`."""
        return [module for module in self.modules() if isinstance(module, Router)]

    @torch.no_grad()
    def update_router_bias(self, load: Int[Tensor, "l e"], rate: float) -> None:
        """Move each router's bias by `rate` towards even load.

        Call it once per optimizer step, with the load of the whole batch over all
        micro-batches and ranks (DeepSeek-V3, section 2.1.2).

        Raises:
            ValueError: `load` has not one row per router, or `rate` is negative.
        """
        require_at_least({"rate": rate}, 0)
        routers = self.routers()
        if len(load) != len(routers):
            raise ValueError(
                f"load must have one row per router; got {len(load)} rows for "
                f"{len(routers)} routers. Pass the sum of LossParts.load."
            )
        for router, row in zip(routers, load.float(), strict=True):
            if router.bias is not None:
                router.bias += rate * torch.sign(row.mean() - row)

    def _embedded(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
        """Return the embeddings; values are looked at only if the lookup failed."""
        try:
            return self.embed(tokens)
        except IndexError:
            require_vocabulary(tokens, self.cfg.vocab_size)
            raise

    def _mtp_weight(self, weight: float | None) -> float:
        mtp = self.cfg.mtp
        if weight is not None:
            require_at_least({"mtp_weight": weight}, 0)
        if mtp is None:
            return 0.0
        return (mtp.loss_weight if weight is None else weight) / mtp.depth

    def _balance(self, routings: list[Routing]) -> Tensor:
        moe = self.cfg.moe
        if moe is None or not routings or not moe.balance_loss_weight:
            return torch.zeros((), device=self.embed.weight.device)
        k = moe.n_activated_experts
        losses = [balance_loss(routing.affinity, k) for routing in routings]
        return moe.balance_loss_weight * torch.stack(losses).sum()

    def _load(self, routings: list[Routing]) -> Tensor:
        if not routings:
            device = self.embed.weight.device
            return torch.zeros((0, 0), dtype=torch.int64, device=device)
        n = routings[0].affinity.shape[-1]
        return torch.stack([expert_load(r.experts, n) for r in routings])


def require_depth(seq_len: int, n_modules: int) -> None:
    """Raise ValueError unless each module of MTP has a token to predict."""
    if seq_len <= n_modules:
        raise ValueError(
            "sequences must be longer than the depth of multi-token prediction, "
            f"{n_modules}, because its last module names a token that far ahead; "
            f"got {seq_len} tokens. Use {n_modules + 1} or more, or set mtp=None "
            "in the model's config."
        )


def deeper_targets(
    targets: Int[Tensor, "b s"], depth: int
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Return what MTP module `depth` is given, and what it predicts.

    An ignored token has no embedding, so its position predicts nothing.

    >>> given, wanted = deeper_targets(torch.tensor([[5, IGNORED, 7, 8]]), 1)
    >>> given.tolist(), wanted.tolist()
    ([[5, 0, 7]], [[-100, -100, 8]])
    """
    given = targets[:, depth - 1 : -1]
    wanted = targets[:, depth:].masked_fill(given == IGNORED, IGNORED)
    return given.clamp(min=0), wanted


def cross_entropy_sum(
    logits: Float[Tensor, "b s v"], targets: Int[Tensor, "b s"]
) -> Float[Tensor, ""]:
    """Return the cross-entropy summed over targets, in nats and FP32."""
    try:
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
    except IndexError:
        require_target_vocabulary(targets, logits.shape[-1])
        raise
