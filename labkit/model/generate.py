"""Text from a model: prefill, then absorbed decoding, plain or speculative."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from jaxtyping import Int
from torch import Tensor, nn

from labkit.model.cache import LatentCache
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
    in BF16 an untrained model, whose logits are nearly equal, soon takes another turn.

    Args:
        model: in any mode; modes are restored.
        tokens: the prompts.
        max_new_tokens: tokens after each prompt.
        temperature: 0 takes the most likely token.
        cache: continues the sequences it holds; afterwards it holds these tokens
            too, all but the last. None makes one in the model's dtype.
        options: top_p, generator, lengths, stop, speculative; see `Options`.

    Raises:
        ValueError: an argument out of its range, or a cache without room.
    """
    sampler = Sampler(temperature, options.get("top_p", 1.0), options.get("generator"))
    if max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens must be at least 1; got {max_new_tokens}. "
            "Set it to the number of tokens wanted."
        )
    _check_options(options)
    lengths = _prompt_lengths(tokens, options.get("lengths"))
    if options.get("speculative"):
        _check_modules(model, lengths)
    stop = options.get("stop")
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
    if tokens.numel() == 0:
        raise ValueError(
            "tokens must hold at least one prompt of one token; got shape "
            f"{(batch, longest)}. Start from a separator token if there is no text."
        )
    given = [longest] * batch if lengths is None else list(lengths)
    if len(given) != batch or not all(1 <= n <= longest for n in given):
        raise ValueError(
            f"lengths must give each of {batch} prompts 1 to {longest} tokens; got "
            f"{given}. Pad prompts on the right and count without padding."
        )
    return torch.tensor(given, device=tokens.device)


def _check_options(options: Options) -> None:
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        raise ValueError(
            f"options must be among {', '.join(Options.__annotations__)}; got "
            f"{', '.join(unknown)}. Correct the name."
        )


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
        longest + max_new_tokens,
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
