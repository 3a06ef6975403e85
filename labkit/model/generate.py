"""Text from a model: prefill, then absorbed decoding, plain or speculative."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from jaxtyping import Int
from torch import Tensor, nn

from labkit.config.checks import require_flag, require_instance, require_whole
from labkit.model.cache import LatentCache
from labkit.model.checks import as_whole, require_tokens, require_vocabulary
from labkit.model.decoder import Decoder
from labkit.model.sampling import Sampler
from labkit.model.speculative import Speculator
from labkit.model.transformer import Transformer


class Options(TypedDict, total=False):
    """What `generate` takes beside its five main arguments, by keyword."""

    top_p: float
    """Mass of the nucleus that tokens are drawn from; default 1."""

    generator: torch.Generator | None
    """Source of chance, on the model's device; default PyTorch's global one."""

    lengths: Sequence[int] | None
    """Tokens of each right-padded prompt; default all."""

    stop: int | None
    """Token that ends a sequence; default none."""

    speculative: bool
    """Whether the MTP modules draft tokens; default no."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """New tokens, and what they took."""

    tokens: Int[Tensor, "b new"]
    """Without the prompt. A sequence that stopped early repeats the stop token."""

    lengths: tuple[int, ...]
    """New tokens of each sequence, its stop token included."""

    n_forwards: int
    """Forward passes of the model after the prefill."""

    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that the model kept; None if none were drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None


def generate(
    model: Transformer,
    tokens: Int[Tensor, "b s"],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    cache: LatentCache | None = None,
    **options: Unpack[Options],
) -> Generation:
    """Return `max_new_tokens` tokens after each prompt, or fewer if all stop.

    Speculative decoding draws from the same distribution as plain decoding. Greedy,
    it gives the same tokens as long as the two best logits differ by more than the
    rounding of their products, which depends on how many rows these have: so in FP32;
    in BF16 an untrained model, whose logits are nearly equal, soon takes another turn,
    and so it may with a cache in FP8, where rounding decides between two stored values.

    Args:
        model: in any mode; modes are restored.
        tokens: the prompts.
        max_new_tokens: tokens after each prompt.
        temperature: 0 takes the most likely token.
        cache: continues the sequences it holds; afterwards it holds these tokens
            too, all but the last. None makes one in the model's dtype.
        options: top_p, generator, lengths, stop, speculative; see `Options`.

    Raises:
        ValueError: an argument out of its range, a cache without room or of another
            model, or logits that are not finite.
    """
    _check_options(options)
    sampler = Sampler(temperature, options.get("top_p", 1.0), options.get("generator"))
    require_whole({"max_new_tokens": max_new_tokens})
    require_instance({"cache": cache}, LatentCache, optional=True)
    stop = options.get("stop")
    _check_vocabulary(model, tokens, stop)
    lengths = _prompt_lengths(tokens, options.get("lengths"))
    if options.get("speculative"):
        _check_modules(model, lengths)
    _check_room(model, cache, lengths + max_new_tokens - 1, tokens.shape[1])
    with _evaluating(model), torch.inference_mode():
        if cache is None:
            cache = _cache_for(model, tokens, max_new_tokens)
        kind = Speculator if options.get("speculative") else Decoder
        decoder = kind(model, cache, sampler)
        first = decoder.prefill(tokens, lengths)
        new = _continue(decoder, first, max_new_tokens, stop)
    # A clone, because autograd refuses a tensor made in inference mode.
    cut, n_new = _cut(new.clone(), stop)
    return Generation(
        cut, n_new, decoder.n_forwards, decoder.n_drafted, decoder.n_accepted
    )


def _continue(
    decoder: Decoder, first: Int[Tensor, "b 1"], n_wanted: int, stop: int | None
) -> Int[Tensor, "b new"]:
    parts, n_left = [first], n_wanted - 1
    while n_left > 0 and not _have_all_stopped(parts, stop):
        parts.append(decoder.step(n_left))
        n_left -= parts[-1].shape[1]
    return torch.cat(parts, dim=1)


def _have_all_stopped(parts: list[Int[Tensor, "b _"]], stop: int | None) -> bool:
    if stop is None:
        return False
    return bool((torch.cat(parts, dim=1) == stop).any(dim=1).all())


def _cut(
    tokens: Int[Tensor, "b new"], stop: int | None
) -> tuple[Int[Tensor, "b shorter"], tuple[int, ...]]:
    """Return the tokens with all after a stop replaced by it, and their counts."""
    if stop is None:
        return tokens, (tokens.shape[1],) * len(tokens)
    is_after = ((tokens == stop).cumsum(dim=1) - (tokens == stop).long()) > 0
    counts = tuple((~is_after).sum(dim=1).tolist())
    return tokens.masked_fill(is_after, stop)[:, : max(counts)], counts


def _prompt_lengths(
    tokens: Int[Tensor, "b s"], lengths: Sequence[int] | None
) -> Int[Tensor, "b"]:
    batch, longest = tokens.shape
    try:
        given = [longest] * batch if lengths is None else list(lengths)
    except TypeError:  # one number for all, say
        given = []
    whole = list(map(as_whole, given))
    if len(whole) != batch or not all(n and 1 <= n <= longest for n in whole):
        raise ValueError(
            f"lengths must give each of {batch} prompts 1 to {longest} tokens; got "
            f"{lengths!r}. Pad prompts on the right and count without padding."
        )
    return torch.tensor(whole, device=tokens.device)


def _check_vocabulary(
    model: Transformer, tokens: Int[Tensor, "b s"], stop: int | None
) -> None:
    """Raise ValueError unless all tokens are the model's: values are read once."""
    require_tokens(tokens)
    require_vocabulary(tokens, model.cfg.vocab_size)
    whole, last = as_whole(stop), model.cfg.vocab_size - 1
    if stop is not None and (whole is None or not 0 <= whole <= last):
        raise ValueError(
            f"stop must be a token, 0 to {last}; got {stop!r}. "
            "Leave it out to generate all tokens."
        )


def _check_room(
    model: Transformer,
    cache: LatentCache | None,
    ends: Int[Tensor, "b"],
    n_padded: int,
) -> None:
    """Raise ValueError unless all tokens fit, before any is read.

    Args:
        model: has room for `max_seq_len` positions.
        cache: has room for `max_seq`, and may hold tokens already.
        ends: tokens that each sequence adds: all but the last, which nobody reads.
            Speculative decoding reads as many; its drafts end where they do.
        n_padded: tokens of the longest prompt, or of its padding, which is read too.
    """
    held, rooms = torch.zeros_like(ends), [("model", "max_seq_len", model.cfg)]
    if cache is not None:
        cache.require_fit(model.cfg)
        cache.require_batch(len(ends))
        held = torch.tensor(cache.lengths, device=ends.device)
        rooms.append(("cache", "max_seq", cache))
    n_positions = int(torch.maximum(held.max() + n_padded, (held + ends).max()))
    for owner, name, limits in rooms:
        excess = n_positions - getattr(limits, name)
        if excess > 0:
            raise ValueError(
                f"prompts and new tokens must fit in the {owner}, after those that a "
                f"cache holds; they need {n_positions} positions, and its {name} is "
                f"{n_positions - excess}. Ask for {excess} fewer, or build the "
                f"{owner} with {name}={n_positions}."
            )


def _check_options(options: Options) -> None:
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        raise ValueError(
            f"options must be among {', '.join(Options.__annotations__)}; got "
            f"{', '.join(unknown)}. Correct the name."
        )
    require_flag({"speculative": options.get("speculative", False)})


def _check_modules(model: Transformer, lengths: Int[Tensor, "b"]) -> None:
    """Raise ValueError unless the MTP modules can draft after these prompts."""
    depth, shortest = len(model.mtp), int(lengths.min())
    if depth == 0:
        raise ValueError(
            "speculative decoding needs MTP modules to draft tokens; this model has "
            "none. Set mtp=MTPConfig() in its config and train it, or pass "
            "speculative=False."
        )
    # A module reads again up to depth - 1 positions, which must exist.
    if shortest < depth - 1:
        raise ValueError(
            f"prompts must have at least {depth - 1} tokens for a chain of {depth} MTP "
            f"modules; got one of {shortest}. Lengthen the prompt, or pass "
            "speculative=False."
        )


def _cache_for(
    model: Transformer, tokens: Int[Tensor, "b s"], max_new_tokens: int
) -> LatentCache:
    batch, longest = tokens.shape
    weight = model.embed.weight
    return LatentCache(
        model.cfg,
        batch,
        longest + max_new_tokens - 1,
        dtype=weight.dtype,
        device=weight.device,
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and afterwards back in its own."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
