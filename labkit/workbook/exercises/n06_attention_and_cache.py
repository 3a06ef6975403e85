"""Exercises of notebook 06: what a cache keeps, absorbing, and a broken update."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from labkit.config import PRESETS, GQAConfig, MLAConfig, ModelConfig
from labkit.workbook.exercises.spec import Case, Exercise, Misconception, Score

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


def append(
    cache: Float[Tensor, "t w"], new: Float[Tensor, "s w"], position: int
) -> Float[Tensor, "t w"]:
    """Return the cache with `new` rows written from `position` on."""
    cache = cache.clone()
    cache[position : position + len(new)] = new
    return cache


def _grow(cache: Tensor, new: Tensor, position: int) -> Tensor:
    return torch.cat([cache, new])


def _one_late(cache: Tensor, new: Tensor, position: int) -> Tensor:
    cache = torch.cat([cache, new])
    cache[position + 1 : position + 1 + len(new)] = new
    return cache[: len(cache) - len(new)]


def _in_place(cache: Tensor, new: Tensor, position: int) -> Tensor:
    cache[position : position + len(new)] = new
    return cache


def cache_gigabytes(cfg: ModelConfig) -> float:
    """Return the GB of a BF16 cache for one sequence of 131,072 tokens."""
    return CONTEXT * cfg.kv_bytes_per_token() / 1e9


GQA_8 = replace(V3, attention=GQAConfig(n_heads=128, n_kv_heads=8))
NARROW = replace(V3, attention=replace(V3.attention, kv_lora_rank=448))

ROWS = torch.zeros(4, 2)
NEW = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

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
                lambda n_layers, a: n_layers * a.kv_lora_rank * 2,
                "the rotary key is kept as well: it is not in the latent",
            ),
            Misconception(
                lambda n_layers, a: 2 * n_layers * a.cache_width * 2,
                "keys and values come from one latent: nothing is kept twice",
            ),
            Misconception(
                lambda n_layers, a: n_layers * a.cache_width,
                "that counts values: a BF16 value takes two bytes",
            ),
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
        ),
        misconceptions=(
            Misconception(
                _first_head_only, "every head has its own w_uk: that uses the first"
            ),
            Misconception(
                _summed_over_heads, "the heads must stay apart: that sums over them"
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
        name="cache_append",
        kind="fix",
        title="The cache that forgets",
        difficulty=2,
        minutes=6,
        task="Rows are written into a preallocated cache from `position` on. Decoding "
        "one token at a time works; a prompt of several tokens comes out wrong. Find "
        "the bug. The function returns a new cache, and leaves the old one as it was.",
        stub='''def append(cache, new, position):
    """Write new rows (s, w) into a cache (t, w) from position on."""
    cache = cache.clone()
    cache[position] = new[0]
    return cache''',
        cases=(
            Case(
                given="one row at position 0",
                args=(ROWS, NEW[:1], 0),
                expected=[[1, 2], [0, 0], [0, 0], [0, 0]],
            ),
            Case(
                given="two rows at position 1",
                args=(ROWS, NEW, 1),
                expected=[[0, 0], [1, 2], [3, 4], [0, 0]],
            ),
            Case(
                given="two rows up to the end",
                args=(ROWS, NEW, 2),
                expected=[[0, 0], [0, 0], [1, 2], [3, 4]],
            ),
        ),
        misconceptions=(
            Misconception(
                _grow, "the cache has its full length already: write, do not append"
            ),
            Misconception(_one_late, "the first new row belongs at position itself"),
            Misconception(
                _in_place, "write into a copy here, so that tests can compare"
            ),
        ),
        hints=(
            "How many rows does `new` have, and how many does the assignment write?",
            "Assign to a slice: from `position` to `position + len(new)`.",
        ),
        solution=append,
    ),
    Exercise(
        name="cache_at_128k",
        kind="predict",
        title="128K tokens of DeepSeek-V3",
        difficulty=1,
        minutes=2,
        task="How many GB (10⁹ bytes) of BF16 cache does one sequence of 131,072 "
        "tokens take in DeepSeek-V3? A guess within 3 per cent counts.",
        stub="gigabytes = None",
        cases=(Case(given="", expected=9.21, tolerance=0.03, unit="GB"),),
        misconceptions=(
            Misconception(
                655, "that is the decompressed cache: 4,997,120 bytes a token"
            ),
            Misconception(0.151, "that is one layer: there are 61"),
            Misconception(4.6, "that is one byte a value: BF16 has two"),
        ),
        hints=("One token takes 70,272 bytes.", "70,272 × 131,072 bytes."),
        solution=9.21,
        because="multi-head attention of the same model would keep 524 GB.",
    ),
    Exercise(
        name="smaller_cache",
        kind="target",
        title="Half the cache, the same heads",
        difficulty=2,
        minutes=6,
        task="Change `PRESETS['v3-671b']` so that a sequence of 131,072 tokens keeps "
        "at most 5 GB, with 128 heads, 61 layers, and an attention of at least 90 "
        "million parameters per layer. Give the `ModelConfig`. The score is GB: the "
        "fewer, the better.",
        stub="my_config = None",
        cases=(
            Case(
                given="the heads",
                measure=lambda cfg: cfg.attention.n_heads,
                expected=128,
            ),
            Case(given="the layers", measure=lambda cfg: cfg.n_layers, expected=61),
            Case(given="the cache", measure=cache_gigabytes, at_most=5, unit="GB"),
            Case(
                given="attention per layer",
                measure=lambda cfg: (
                    cfg.parameter_counts().attention / cfg.n_layers / 1e6
                ),
                at_least=90,
                unit="million parameters",
            ),
        ),
        misconceptions=(
            Misconception(V3, "the model as it is: its latent is 512 wide"),
            Misconception(GQA_8, "GQA with 8 groups keeps 2,048 values, MLA 576"),
            Misconception(
                NARROW, "the rotary key counts too: latent and key sum to at most 312"
            ),
        ),
        hints=(
            "The cache holds `kv_lora_rank + qk_rope_head_dim` values per token and "
            "layer.",
            "Lower the latent until the bound on parameters stops you, then the key.",
        ),
        solution=replace(V3, attention=replace(V3.attention, kv_lora_rank=224)),
        score=Score(of=cache_gigabytes, unit="GB"),
    ),
)
