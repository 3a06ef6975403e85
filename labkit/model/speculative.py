"""Speculative decoding: the MTP modules draft tokens, one forward pass checks them.

A pass over k + 1 tokens costs little more than one over 1, because decoding waits
for weights. The model reads the pending token and k drafts, keeps the drafts that it
would have chosen itself, and adds one token of its own (DeepSeek-V3, section 5.4.3).
The output has the model's own distribution whatever the drafts are (Leviathan et
al., 2023, algorithm 1); only the speed depends on them.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from labkit.model.cache import LatentCache
from labkit.model.decoder import Decoder
from labkit.model.sampling import Sampler
from labkit.model.transformer import Transformer


class Draft(NamedTuple):
    """Tokens proposed for each sequence, and what they were drawn from."""

    tokens: Int[Tensor, "b k"]
    probabilities: Float[Tensor, "b k v"]


class Speculator(Decoder):
    """A decoder that gains several tokens per forward pass of the model.

    All sequences of a batch advance together, by the fewest drafts accepted.
    """

    def __init__(
        self, model: Transformer, cache: LatentCache, sampler: Sampler
    ) -> None:
        super().__init__(model, cache, sampler)
        self.drafter = Drafter(model, cache, sampler)

    def prefill(
        self, tokens: Int[Tensor, "b s"], lengths: Int[Tensor, "b"]
    ) -> Int[Tensor, "b 1"]:
        hidden = self._read_prompts(tokens, lengths)
        self.pending = self._choose_after(hidden, lengths)
        following = F.pad(tokens[:, 1:], (0, 1))
        following = following.scatter(1, (lengths - 1).unsqueeze(-1), self.pending)
        self.news = self.model.norm(hidden), following, lengths - 1
        return self.pending

    def step(self, n_wanted: int) -> Int[Tensor, "b new"]:
        n_drafts = min(len(self.model.mtp), n_wanted - 1)
        if n_drafts == 0:
            return super().step(n_wanted)
        tokens, probabilities = self.drafter.draft(*self.news)
        draft = Draft(tokens[:, :n_drafts], probabilities[:, :n_drafts])
        emitted = self._verify(draft)
        self.pending = emitted[:, -1:]
        return emitted

    def _verify(self, draft: Draft) -> Int[Tensor, "b new"]:
        held = self.cache.lengths
        tokens = torch.cat((self.pending, draft.tokens), dim=1)
        hidden, _ = self.model.hidden(tokens, self.cache)
        self.n_forwards += 1
        normed = self.model.norm(hidden)
        target = self.sampler.distribution(self.model.head(normed))
        n_accepted, emitted = accept(target, draft, self.sampler)
        self.n_drafted += draft.tokens.numel()
        self.n_accepted += int(n_accepted.sum())

        n_new = emitted.shape[1]
        self.cache.rewind([n + n_new for n in held])
        self.drafter.settle(n_new - 1)
        self.news = normed[:, :n_new], emitted, torch.full_like(n_accepted, n_new - 1)
        return emitted


class Drafter:
    """The MTP modules as a chain that proposes one token each.

    Module k reads, at position j, the hidden state of module k - 1 and token j + k.
    Each module keeps a cache of its own, one layer deep; these come on top of the
    main cache. A position whose token was a rejected draft is read again.
    """

    def __init__(self, model: Transformer, main: LatentCache, sampler: Sampler) -> None:
        self.model = model
        self.sampler = sampler
        one_layer = replace(model.cfg, n_layers=1, n_dense_layers=0)
        storage = {"dtype": main.dtype, "device": main.entries.device}
        self.caches = [
            LatentCache(one_layer, main.batch, main.max_seq, **storage)
            for _ in model.mtp
        ]
        self.carried: list[Tensor | None] = [None for _ in model.mtp]
        """For each module, the input row (b, 1, d) that it must read again."""
        self.inputs: list[Tensor] = []
        """For each module, the rows (b, s, d) that it read last."""
        self.ends: list[Tensor] = []
        """For each module, how many of these rows are a sequence's own (b)."""

    def draft(
        self,
        hidden: Float[Tensor, "b s d"],
        following: Int[Tensor, "b s"],
        last: Int[Tensor, "b"],
    ) -> Draft:
        """Return one draft per module, after reading the model's new tokens.

        Args:
            hidden: the model's normed hidden states, at positions not yet read.
            following: the token after each of these positions.
            last: index of each sequence's last position; what follows is padding.
        """
        model, depth = self.model, len(self.caches)
        rows = torch.arange(len(hidden), device=hidden.device)
        known = F.pad(following, (0, depth))
        self.inputs, self.ends = [], []
        probabilities, n_carried = [], 0
        x = hidden
        for k in range(depth):
            if self.carried[k] is not None:
                x = torch.cat((self.carried[k], x), dim=1)
                n_carried += 1
            self.inputs.append(x)
            self.ends.append(last + n_carried + 1)
            given = known[:, k - n_carried :][:, : x.shape[1]]
            x = self._read(k, x, given)
            logits = model.head(x[rows, last + n_carried])
            probabilities.append(self.sampler.distribution(logits))
            known[rows, last + k + 1] = self.sampler.draw(probabilities[-1])
        drafted = last.unsqueeze(-1) + 1 + torch.arange(depth, device=last.device)
        return Draft(known.gather(1, drafted), torch.stack(probabilities, dim=1))

    def settle(self, n_accepted: int) -> None:
        """Forget what rests on drafts after the first `n_accepted`."""
        rows = torch.arange(self.caches[0].batch, device=self.inputs[0].device)
        for k, cache in enumerate(self.caches):
            n_stale = max(0, k - n_accepted)
            self.carried[k] = None
            if n_stale:
                cache.rewind([n - n_stale for n in cache.lengths])
                first = self.inputs[k][rows, self.ends[k] - n_stale]
                self.carried[k] = first.unsqueeze(1)

    def _read(
        self, k: int, x: Float[Tensor, "b s d"], given: Int[Tensor, "b s"]
    ) -> Float[Tensor, "b s d"]:
        model, module, cache = self.model, self.model.mtp[k], self.caches[k]
        held = cache.lengths
        window = cache.reserve(*given.shape)
        turns = model.turns(window.positions)
        x, _ = module(x, model.embed(given), turns, window.layer(0))
        window.commit()
        n_read = self.ends[k].tolist()
        cache.rewind([start + n for start, n in zip(held, n_read, strict=True)])
        return module.norm(x)


def accept(
    target: Float[Tensor, "b k1 v"], draft: Draft, sampler: Sampler
) -> tuple[Int[Tensor, "b"], Int[Tensor, "b new"]]:
    """Return each sequence's count of accepted drafts, and the tokens all gain.

    A draft stays with probability min(1, target / draft). The first that does not is
    replaced by a token from the part of the target that the draft left uncovered,
    which makes up exactly the target's distribution; after the last draft comes one
    more token. Sequences gain equally many tokens: the fewest accepted, plus one.

    Args:
        target: the model's probabilities after the pending token and each draft.
        draft: the drafts; greedy decoding is the case of one-hot probabilities.
        sampler: source of chance.
    """
    n_drafts = draft.tokens.shape[1]
    chosen = draft.tokens.unsqueeze(-1)
    wanted = target[:, :n_drafts].gather(-1, chosen).squeeze(-1)  # (b, k)
    offered = draft.probabilities.gather(-1, chosen).squeeze(-1)
    chance = torch.rand(wanted.shape, generator=sampler.generator, device=wanted.device)
    is_kept = (chance * offered < wanted).cumprod(dim=1)
    n_accepted = is_kept.sum(dim=1)
    shared = int(n_accepted.min())
    final = target[:, shared]
    if shared == n_drafts:
        last = sampler.draw(final)
    else:
        uncovered = (final - draft.probabilities[:, shared]).clamp(min=0)
        # Nothing is uncovered where the draft was kept, or by rounding alone.
        is_covered = uncovered.sum(dim=-1, keepdim=True) == 0
        replacement = sampler.draw(torch.where(is_covered, final, uncovered))
        is_own = n_accepted > shared
        last = torch.where(is_own, draft.tokens[:, shared], replacement)
    emitted = torch.cat((draft.tokens[:, :shared], last.unsqueeze(-1)), dim=1)
    return n_accepted, emitted
