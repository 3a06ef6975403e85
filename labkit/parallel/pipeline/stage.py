"""A stage of a pipeline: some layers of a model, and what lies before or behind them.

The first stage has the embedding; the last has the final norm, the head and the
modules of multi-token prediction, and gives the loss. Names are those of the whole
model. Between stages only the hidden state travels: the balance loss of a stage adds
to no other value, so that its gradient is let in where it arises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Never

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from labkit.config import ModelConfig
from labkit.model import Transformer
from labkit.model.moe import Routing


@dataclass(frozen=True, slots=True)
class Figures:
    """What one stage made of one micro-batch, weights included, without gradients."""

    main: Float[Tensor, ""]
    mtp: Float[Tensor, ""]
    balance: Float[Tensor, ""]
    load: Int[Tensor, "l e"]
    """A row for each router of the whole model, zero for those of other stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What all micro-batches of a step share, and where their figures are gathered."""

    n_tokens: int
    """Targets of the whole step: all ranks, all micro-batches."""

    n_sequences: int
    """Sequences of the whole step."""

    seq_len: int
    """Tokens of a sequence; a rank may hold a part of its hidden states."""

    mtp_weight: float | None = None
    figures: list[Figures] = field(default_factory=list)


class Stage(Transformer):
    """Consecutive layers of a model, cut out of it: they are the model's own.

    Args:
        model: the whole model; after this it shares its modules with its stages.
        layers: which of its layers.
        is_first: whether the embedding is here.
        is_last: whether norm, head and MTP modules are here.
    """

    def __init__(
        self, model: Transformer, layers: range, *, is_first: bool, is_last: bool
    ) -> None:
        nn.Module.__init__(self)
        self.cfg, self._frequencies = model.cfg, model._frequencies
        self.is_first, self.is_last = is_first, is_last
        self.router_rows = _router_rows(model.cfg, layers, is_last=is_last)
        self._lists_all = False
        self.embed = model.embed if is_first else None
        self.layers = nn.ModuleList()
        for index in layers:
            # Not renumbered, so that names are those of the whole model.
            self.layers.add_module(str(index), model.layers[index])
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None
        self.mtp = model.mtp if is_last else nn.ModuleList()

    def borrow_embedding(self, owner: "Stage") -> None:
        """Read the embedding of another stage on this rank, whose it stays."""
        # Past nn.Module, so that it is nobody's child twice.
        self.__dict__["embed"] = _Borrowed(owner, self)

    @contextmanager
    def differentiated(self) -> Iterator[None]:
        """Count a borrowed embedding among `parameters`, for it gets gradients here."""
        self._lists_all = True
        try:
            yield
        finally:
            self._lists_all = False

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this stage's own parameters."""
        yield from super().parameters(recurse)
        if self._lists_all and isinstance(self.embed, _Borrowed):
            yield self.embed.weight

    @property
    def loss(self) -> Never:
        """What a stage has not: the last one's forward pass returns the loss."""
        raise AttributeError("a stage has no loss of its own; call the stage")

    def forward(
        self,
        x: Shaped[Tensor, "b s *d"],
        targets: Int[Tensor, "b s"] | None = None,
        *,
        terms: Terms,
    ) -> Float[Tensor, "*out"]:
        """Return the hidden state for the next stage, or the loss.

        Args:
            x: tokens, or the hidden state of the stage before.
            targets: as for the whole model; the last stage needs them.
            terms: of the step.
        """
        device = x.device
        if self.is_first:
            x = self._embedded(x)
        turns = self.turns(torch.arange(terms.seq_len, device=device))
        routings = []
        for layer in self.layers:
            x, routing = layer(x, turns)
            if routing is not None:
                routings.append(routing)
        if self.is_last:
            return self._total(x, targets, routings, terms)
        balance = self._balance_of(routings, terms, device)
        none = torch.zeros((), device=device)
        self._note(terms, routings, (none, none, balance))
        return _LetIn.apply(x, balance) if balance.requires_grad else x

    def _total(
        self,
        x: Float[Tensor, "b s d"],
        targets: Int[Tensor, "b s"],
        routings: list[Routing],
        terms: Terms,
    ) -> Float[Tensor, ""]:
        targets = targets.long()
        normed = self.norm(x)
        main = self.token_loss_sum(normed, targets) / terms.n_tokens
        deeper, of_mtp = self.mtp_loss_sum(normed, targets)
        mtp = deeper * (self._mtp_weight(terms.mtp_weight) / terms.n_tokens)
        routings = routings + of_mtp
        balance = self._balance_of(routings, terms, x.device)
        self._note(terms, routings, (main, mtp, balance))
        return main + mtp + balance

    def _balance_of(
        self, routings: list[Routing], terms: Terms, device: torch.device
    ) -> Float[Tensor, ""]:
        if not routings or not self.cfg.moe.balance_loss_weight:
            return torch.zeros((), device=device)
        return self._balance(routings) / terms.n_sequences

    def _note(
        self,
        terms: Terms,
        routings: list[Routing],
        parts: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        main, mtp, balance = (part.detach() for part in parts)
        n_experts = 0 if self.cfg.moe is None else self.cfg.moe.n_routed_experts
        shape = (_n_routers(self.cfg), n_experts)
        load = torch.zeros(shape, dtype=torch.int64, device=main.device)
        if routings:
            load[self.router_rows] = self._load(routings)
        terms.figures.append(Figures(main, mtp, balance, load))


def _n_routers(cfg: ModelConfig) -> int:
    return 0 if cfg.moe is None else cfg.n_moe_layers + cfg.n_mtp


def _router_rows(cfg: ModelConfig, layers: range, *, is_last: bool) -> list[int]:
    """Return which rows of the whole model's load the routers of a stage have."""
    if cfg.moe is None:
        return []
    n_dense = cfg.n_layers - cfg.n_moe_layers
    rows = [index - n_dense for index in layers if index >= n_dense]
    return rows + [cfg.n_moe_layers + depth for depth in range(cfg.n_mtp) if is_last]


class _Borrowed:
    """The embedding of another stage, as a stage reads it."""

    def __init__(self, owner: Stage, reader: Stage) -> None:
        self.owner, self.reader = owner, reader

    @property
    def weight(self) -> nn.Parameter:
        return self.owner.embed.weight

    def __call__(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
        # Weights of the reader may be rounded while it computes, the owner's not.
        return self.owner.embed(tokens).to(self.reader.norm.weight.dtype)


class _LetIn(torch.autograd.Function):
    """Passes a hidden state on, and gives a loss its gradient of 1 on the way back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.one = loss.new_ones(())
        # Not a view: the schedules detach what a stage returns, in place.
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.one
