"""Decoding of labkit beside transformers: tokens/s at batch 1, as ratios.

Same weights and prompt, one process, alternating; medians. labkit runs the loop of
`generate`; transformers its forward pass with its DynamicCache, which is what its own
`generate` does at each token and less, with its experts computed in the fastest of its
ways. Both are greedy. Prefill is timed too, without a floor, as is BF16.
Run with `make bench`, or `python tests/benchmarks/bench_decode.py [--busy]`.

With `--busy`, for a machine that other programs use, it takes one thread and counts
the CPU seconds of this process.
"""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from reference import EXPERT_IMPLEMENTATIONS, medians, paired_models
from torch import Tensor, nn
from transformers import DynamicCache

from labkit.model import LatentCache, Transformer
from labkit.model.decoder import Decoder
from labkit.model.sampling import Sampler

FLOORS = {128: 2.5, 2048: 5.0}
"""Least tokens/s of labkit in FP32 over transformers' best, by tokens in the cache."""

N_TOKENS = 16
"""Tokens decoded in one timed run."""


class Side(NamedTuple):
    """What one of the two libraries does with a prompt."""

    prefill: Callable[[], Tensor]
    """Return the first new token, from an empty cache."""

    decode: Callable[[], Tensor]
    """Return the tokens after it, from a cache that holds the prompt."""


def our_side(model: Transformer, prompt: Tensor) -> Side:
    context = prompt.shape[1]
    dtype = model.embed.weight.dtype
    cache = LatentCache(model.cfg, 1, context + N_TOKENS, dtype=dtype)
    decoder = Decoder(model, cache, Sampler())

    def prefill() -> Tensor:
        cache.rewind(0)
        return decoder.prefill(prompt, torch.tensor([context]))

    first = prefill()

    def decode() -> Tensor:
        cache.rewind(context)
        decoder.pending = first
        return torch.cat([decoder.step(1) for _ in range(N_TOKENS)], dim=1)

    return Side(prefill, decode)


def their_side(model: nn.Module, prompt: Tensor) -> Side:
    context = prompt.shape[1]

    def read(tokens: Tensor, cache: DynamicCache) -> Tensor:
        output = model(tokens, cache=cache, use_cache=True, logits_to_keep=1)
        return output.logits.argmax(dim=-1)

    def prefill() -> Tensor:
        return read(prompt, DynamicCache(config=model.config))

    held = DynamicCache(config=model.config)
    first = read(prompt, held)

    def decode() -> Tensor:
        held.crop(context - held.get_seq_length())
        token, tokens = first, []
        for _ in range(N_TOKENS):
            token = read(token, held)
            tokens.append(token)
        return torch.cat(tokens, dim=1)

    return Side(prefill, decode)


def in_turn(
    ours: Side, theirs: Side, model: nn.Module, what: str
) -> dict[str, Callable[[], Tensor]]:
    """Return one of the sides' runs, and transformers' for each of its experts."""
    runs = {"labkit": getattr(ours, what)}
    for kind in EXPERT_IMPLEMENTATIONS:
        if (kind, what) == ("batched_mm", "prefill"):
            continue  # copies the weights of each token's experts: 400 MB per 128

        def run(kind: str = kind) -> Tensor:
            model.set_experts_implementation(kind)
            return getattr(theirs, what)()

        runs[kind] = run
    return runs


def report(what: str, times: dict[str, float], n_tokens: int) -> float:
    """Print tokens/s; return labkit's over transformers' best."""
    speeds = {name: n_tokens / seconds for name, seconds in times.items()}
    ours = speeds.pop("labkit")
    ratio = ours / max(speeds.values())
    others = ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items())
    print(f"  {what}: labkit {ours:,.0f} tokens/s; transformers {others}; {ratio:.2f}×")
    return ratio


def compare(context: int, precision: str, n_rounds: int, clock: Callable) -> float:
    """Print both phases at one context; return the ratio of decoding."""
    ours, theirs = paired_models()
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    ours, theirs = ours.to(dtype).eval(), theirs.to(dtype).eval()
    chance = torch.Generator().manual_seed(0)
    prompt = torch.randint(256, (1, context), generator=chance)
    sides = our_side(ours, prompt), their_side(theirs, prompt)
    n_equal = int((sides[0].decode() == sides[1].decode()).sum())
    print(f"{precision}, context {context}: {n_equal} of {N_TOKENS} tokens equal")
    prefill = in_turn(*sides, theirs, "prefill")
    report("prefill", medians(prefill, max(n_rounds // 3, 1), clock), context)
    decode = in_turn(*sides, theirs, "decode")
    return report("decode", medians(decode, n_rounds, clock), N_TOKENS)


@torch.inference_mode()
def main() -> None:
    is_busy = "--busy" in sys.argv[1:]
    torch.set_num_threads(1 if is_busy else 2)
    clock = time.process_time if is_busy else time.perf_counter
    n_rounds = 9
    ratios = {context: compare(context, "fp32", n_rounds, clock) for context in FLOORS}
    for context in FLOORS:
        compare(context, "bf16", n_rounds, clock)
    missed = [context for context in FLOORS if ratios[context] < FLOORS[context]]
    for context in missed:
        print(f"missed: {FLOORS[context]}× at context {context}")
    if not missed:
        print("every floor reached")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
