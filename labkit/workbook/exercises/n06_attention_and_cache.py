"""Exercises of notebook 06: what a cache keeps, absorbing, and a broken write."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labkit.config import PRESETS, GQAConfig, MLAConfig, ModelConfig
from labkit.memory import AllocationCount
from labkit.workbook.exercises.config_changes import changed_fields
from labkit.workbook.exercises.spec import Case, Exercise, Misconception

V3 = PRESETS["v3-671b"]

CONTEXT = 131_072


def kv_bytes_per_token(n_layers: int, attention: MLAConfig) -> int:
    """Return the bytes of a BF16 cache for one token: latent and one rotary key."""
    return n_layers * (attention.kv_lora_rank + attention.qk_rope_head_dim) * 2


def absorbed_scores(
    q_nope: Float[Tensor, "h n"],
    w_uk: Float[Tensor, "h n c"],
    latent: Float[Tensor, "t c"],
) -> Float[Tensor, "h t"]:
    """Return scores against the latent itself: W_UK moves over to the query."""
    absorbed = torch.einsum("hn,hnc->hc", q_nope, w_uk)
    return absorbed @ latent.T


def _first_head_only(q_nope: Tensor, w_uk: Tensor, latent: Tensor) -> Tensor:
    return torch.einsum("hn,nc->hc", q_nope, w_uk[0]) @ latent.T


def _summed_over_heads(q_nope: Tensor, w_uk: Tensor, latent: Tensor) -> Tensor:
    return torch.einsum("hn,hnc->c", q_nope, w_uk) @ latent.T


def keys_made(scores: Callable[..., Float[Tensor, "h t"]]) -> str:
    """Return for how many past tokens a key is made on the way: "none" or "all".

    Keys are h · n · t values, made at once or one by one; nothing else is as large.
    """
    n_heads, n, c, n_tokens = 2, 64, 4, 256
    q_nope, w_uk = torch.ones(n_heads, n), torch.ones(n_heads, n, c)
    latent = torch.ones(n_tokens, c)
    with AllocationCount() as made:
        scores(q_nope, w_uk, latent)
    size_of_keys = n_heads * n * n_tokens * latent.itemsize
    return "all" if made.total_bytes >= size_of_keys else "none"


def write(
    cache: Float[Tensor, "b t w"],
    new: Float[Tensor, "b s w"],
    positions: Int[Tensor, "b s"],
) -> Float[Tensor, "b t w"]:
    """Return the cache with each sequence's rows at that sequence's positions."""
    cache = cache.clone()
    rows = torch.arange(len(cache)).unsqueeze(1)  # (b, 1), to go with each position
    cache[rows, positions] = new
    return cache


def _all_into_all(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    cache = cache.clone()
    cache[:, positions] = new
    return cache


def _grow(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    return torch.cat([cache, new], dim=1)


def _one_late(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    rows = torch.arange(len(cache)).unsqueeze(1)
    cache = torch.cat([cache, cache], dim=1)
    cache[rows, positions + 1] = new
    return cache[:, : cache.shape[1] // 2]


def _in_place(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    cache[torch.arange(len(cache)).unsqueeze(1), positions] = new
    return cache


def cache_gibibytes(cfg: ModelConfig) -> float:
    """Return the GiB of a BF16 cache for one sequence of 131,072 tokens."""
    return CONTEXT * cfg.kv_bytes_per_token() / 2**30


def _width(name: str) -> Callable[[ModelConfig], int]:
    """Return what reads a width of the attention; 0 where it has none."""
    return lambda cfg: getattr(cfg.attention, name, 0) or 0


def _latent_of(rank: int, **widths: int | None) -> ModelConfig:
    """Return DeepSeek-V3 with another latent, and other widths of its attention."""
    return replace(V3, attention=replace(V3.attention, kv_lora_rank=rank, **widths))


ONE_KEY = replace(V3, attention=GQAConfig(n_heads=128, n_kv_heads=1))
NARROW = _latent_of(192)
NO_ROTATION = _latent_of(192, v_head_dim=176, qk_rope_head_dim=2)
NO_QUERY_RANK = _latent_of(192, q_lora_rank=None)

EMPTY = torch.zeros(2, 4, 1)
NEW = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])

EXERCISES = (
    Exercise(
        name="kv_bytes_per_token",
        kind="write",
        title="What one token leaves behind",
        difficulty=1,
        minutes=5,
        task="Write `kv_bytes(n_layers, attention)`: the bytes that one token keeps in "
        "a BF16 cache of latent attention. `attention` is a `MLAConfig`.",
        stub="def kv_bytes(n_layers, attention):\n    ...",
        cases=(
            Case(
                given="heads=128, layers=61", args=(61, V3.attention), expected=70_272
            ),
            Case(
                given="heads=128, layers=60", args=(60, V3.attention), expected=69_120
            ),
            Case(
                given="heads=16, layers=27",
                args=(27, PRESETS["v2-lite-16b"].attention),
                expected=31_104,
            ),
            Case(
                given="a latent of 32 and a rotary key of 16, one layer",
                args=(1, PRESETS["tiny"].attention),
                expected=96,
            ),
        ),
        misconceptions=(
            Misconception(
                lambda n_layers, a: n_layers * a.decompressed_cache_width * 2,
                "that is the decompressed cache: MLA keeps the latent",
            ),
            Misconception(
                lambda n_layers, a: (
                    n_layers * a.n_heads * (a.qk_nope_head_dim + a.v_head_dim) * 2
                ),
                "a key and a value of every head is what MHA keeps: MLA keeps one "
                "latent for all heads, and a rotary key",
            ),
            Misconception(
                lambda n_layers, a: n_layers * a.kv_lora_rank * 2,
                "the rotary key is kept as well: it is not in the latent",
            ),
            Misconception(
                lambda n_layers, a: (
                    n_layers * (a.kv_lora_rank + a.n_heads * a.qk_rope_head_dim) * 2
                ),
                "that is a rotary key per head: one serves all heads",
            ),
            Misconception(
                lambda n_layers, a: 2 * n_layers * a.cache_width * 2,
                "twice too much: one latent for keys and values, two bytes a value",
            ),
            Misconception(
                lambda n_layers, a: n_layers * a.cache_width,
                "that counts values: a BF16 value takes two bytes",
            ),
            Misconception(lambda n_layers, a: a.cache_width * 2, "that is one layer"),
        ),
        hints=(
            "Which two things must be kept so that keys and values of a past token "
            "can be rebuilt?",
            "The latent, and the one rotary key that all heads share.",
            "`n_layers * (kv_lora_rank + qk_rope_head_dim) * 2`",
        ),
        solution=kv_bytes_per_token,
        because="the number of heads does not appear.",
    ),
    Exercise(
        name="absorbed_scores",
        kind="write",
        title="Score without unpacking",
        difficulty=3,
        minutes=12,
        task="Keys would be `latent @ w_uk[h].T` for head h. Write "
        "`scores(q_nope, w_uk, latent)`, which gives the same query-key products, of "
        "shape (heads, tokens), without ever making keys. Shapes: `q_nope` (h, n), "
        "`w_uk` (h, n, c), `latent` (t, c).",
        stub="def scores(q_nope, w_uk, latent):\n    ...",
        cases=(
            Case(
                given="two heads of width 1, a latent of width 2, two tokens",
                args=(
                    torch.tensor([[1.0], [2.0]]),
                    torch.tensor([[[1.0, 0.0]], [[3.0, 1.0]]]),
                    torch.tensor([[1.0, 2.0], [0.0, 5.0]]),
                ),
                # head 0: 1·(1·1 + 0·2), 1·(0); head 1: 2·(3 + 2), 2·(0 + 5)
                expected=[[1.0, 0.0], [10.0, 10.0]],
            ),
            Case(
                given="one head of width 2, a latent of width 1, three tokens",
                args=(
                    torch.tensor([[1.0, -1.0]]),
                    torch.tensor([[[2.0], [5.0]]]),
                    torch.tensor([[1.0], [2.0], [-1.0]]),
                ),
                expected=[[-3.0, -6.0, 3.0]],
            ),
            Case(
                given="the past tokens that get a key on the way",
                measure=keys_made,
                expected="none",
            ),
        ),
        misconceptions=(
            Misconception(
                _first_head_only, "every head has its own w_uk: that uses the first"
            ),
            Misconception(
                _summed_over_heads, "the heads must stay apart: that sums over them"
            ),
            Misconception(
                lambda q, w, c: (q @ w) @ c.T,
                "`@` takes `q_nope` for one matrix and multiplies all queries with "
                "each head's `w_uk`: pair head with head, by einsum or with "
                "`q_nope[:, None]`",
            ),
            Misconception(
                lambda q, w, c: torch.einsum("hn,hnt->ht", q, w @ c.T),
                "the scores are right, but the product of `w_uk` and `latent` is the "
                "key of every past token: multiply `w_uk` with the query first",
            ),
        ),
        hints=(
            "q · (W c) = (Wᵀ q) · c: which side is multiplied once, and not per token?",
            "Multiply query and `w_uk` first: the result has the width of the latent.",
            '`torch.einsum("hn,hnc->hc", q_nope, w_uk) @ latent.T`',
        ),
        solution=absorbed_scores,
        because="the query pays once per step; a key would be made per past token.",
    ),
    Exercise(
        name="cache_positions",
        kind="fix",
        title="The cache that mixes up its sequences",
        difficulty=2,
        minutes=8,
        task="New rows of a batch are written into a preallocated cache, each "
        "sequence's at its own `positions`. While all sequences are equally long it "
        "works; with prompts of different lengths the text turns to nonsense. Find "
        "the bug. The function returns a new cache, and leaves the old one as it was.",
        stub='''def write(cache, new, positions):
    """Write new rows (b, s, w) into a cache (b, t, w) at positions (b, s)."""
    cache = cache.clone()
    cache[:, positions[0]] = new
    return cache''',
        cases=(
            Case(
                given="two sequences of equal length",
                args=(EMPTY, NEW, torch.tensor([[1, 2], [1, 2]])),
                expected=[[[0], [1], [2], [0]], [[0], [3], [4], [0]]],
            ),
            Case(
                given="sequences that hold 0 and 2 tokens",
                args=(EMPTY, NEW, torch.tensor([[0, 1], [2, 3]])),
                expected=[[[1], [2], [0], [0]], [[0], [0], [3], [4]]],
            ),
            Case(
                given="one new token each, at 3 and at 0",
                args=(EMPTY, NEW[:, :1], torch.tensor([[3], [0]])),
                expected=[[[0], [0], [0], [1]], [[3], [0], [0], [0]]],
            ),
        ),
        misconceptions=(
            Misconception(
                _all_into_all,
                "a colon in front pairs every sequence with every row of positions",
            ),
            Misconception(
                _grow, "the cache has its full length already: write, do not append"
            ),
            Misconception(_one_late, "the first new row belongs at its position"),
            Misconception(
                _in_place, "write into a copy here, so that tests can compare"
            ),
        ),
        hints=(
            "Whose positions does `positions[0]` hold?",
            "Index both dimensions at once: a sequence number for every position.",
            "`torch.arange(len(cache)).unsqueeze(1)` broadcasts against `positions`.",
        ),
        solution=write,
        because="nothing failed loudly: a wrong position only changes the text.",
    ),
    Exercise(
        name="cache_of_a_batch",
        kind="predict",
        title="Eight conversations with DeepSeek-V2-Lite",
        difficulty=1,
        minutes=3,
        task="How many GB (10⁹ bytes) of BF16 cache do eight sequences of 32,768 "
        "tokens take in DeepSeek-V2-Lite (27 layers, 16 heads, a latent of 512 and a "
        "rotary key of 64)? A guess within 3 per cent counts.",
        stub="gigabytes = None",
        cases=(Case(given="", expected=8.15, tolerance=0.03, unit="GB"),),
        misconceptions=(
            Misconception(7.59, "that is GiB of 2³⁰ bytes: a GB has 10⁹"),
            Misconception(
                72.5, "that is the decompressed cache: 276,480 bytes a token"
            ),
            Misconception(58, "that is MHA: MLA keeps one latent for all heads"),
            Misconception(7.25, "the rotary key is kept as well, beside the latent"),
            Misconception(16.3, "twice too much: a BF16 value takes two bytes"),
            Misconception(0.302, "that is one layer: there are 27"),
            Misconception(1.02, "that is one sequence: there are eight"),
            Misconception(4.08, "that is one byte a value: BF16 has two"),
        ),
        hints=(
            "One token takes 27 × (512 + 64) × 2 bytes.",
            "31,104 × 8 × 32,768 bytes.",
        ),
        solution=8.15,
        because="multi-head attention with 16 heads of 128 would keep 58 GB.",
    ),
    Exercise(
        name="smaller_cache",
        kind="target",
        title="128K tokens in 4 GiB, and no parameter less",
        difficulty=2,
        minutes=8,
        task="Change the attention of `PRESETS['v3-671b']` so that a sequence of "
        "131,072 tokens keeps at most 4 GiB in BF16, with no less than the 187.1 "
        "million attention parameters per layer that it has now. Its 128 heads, its "
        "rotary width of 64 and its query rank of 1,536 stay, and the latent has at "
        "least 128 values. Give the `ModelConfig`.",
        stub="my_config = None",
        cases=(
            Case(
                given="what changed outside attention",
                measure=partial(changed_fields, original=V3, but="attention"),
                expected="nothing",
            ),
            Case(given="the heads", measure=_width("n_heads"), expected=128),
            Case(given="the cache", measure=cache_gibibytes, at_most=4, unit="GiB"),
            Case(given="the latent", measure=_width("kv_lora_rank"), at_least=128),
            Case(
                given="the rotary width",
                measure=_width("qk_rope_head_dim"),
                expected=64,
            ),
            Case(given="the query rank", measure=_width("q_lora_rank"), expected=1536),
            Case(
                given="attention per layer",
                measure=lambda cfg: (
                    cfg.parameter_counts().attention / cfg.n_layers / 1e6
                ),
                at_least=187.1,
                unit="million parameters",
            ),
        ),
        misconceptions=(
            Misconception(V3, "the model as it is: its latent is 512 wide"),
            Misconception(V3.attention, "give a whole ModelConfig, not a part of it"),
            Misconception(
                NO_ROTATION,
                "the rotary key tells positions apart: it is no room to save in",
            ),
            Misconception(
                NO_QUERY_RANK,
                "queries are not cached: without their rank the parameters grow, but "
                "not where keys and values come from",
            ),
            Misconception(
                ONE_KEY, "one key head of GQA fits, but then all heads see the same key"
            ),
            Misconception(
                NARROW,
                "the up-projections shrank with the latent: which widths cost "
                "parameters and no cache?",
            ),
        ),
        hints=(
            "The cache holds `kv_lora_rank + qk_rope_head_dim` values per token and "
            "layer: how many fit into 4 GiB?",
            "`qk_nope_head_dim` and `v_head_dim` are rebuilt from the latent: widen "
            "them.",
            "A latent of 192 and `v_head_dim=160` do it.",
        ),
        solution=_latent_of(192, v_head_dim=160),
        because="what is rebuilt from the latent is not in the cache.",
    ),
)
