"""Exercises of notebook 01: counting, routing, predicting, and a sparse giant."""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from labkit.config import PRESETS, MLAConfig, ModelConfig
from labkit.config.counts import attention_params
from labkit.workbook.exercises.config_changes import changed_fields
from labkit.workbook.exercises.mla_parts import left_out
from labkit.workbook.exercises.spec import Case, Exercise, Misconception, Score

V3 = PRESETS["v3-671b"]


def terabytes(n_params: int, bits: int) -> float:
    """Return the TB that parameters of so many bits take."""
    return n_params * bits / 8 / 1e12


def weights_of(
    affinity: Float[Tensor, "n e"], bias: Float[Tensor, "e"], n_activated: int
) -> Float[Tensor, "n k"]:
    """Return the weights of the chosen experts: choose with bias, weigh without."""
    experts = (affinity + bias).topk(n_activated, dim=-1).indices
    weights = affinity.gather(-1, experts)
    return weights / weights.sum(dim=-1, keepdim=True)


def _chosen_only(affinity: Tensor, bias: Tensor, n_activated: int) -> Tensor:
    weights = affinity.topk(n_activated, dim=-1).values
    return weights / weights.sum(dim=-1, keepdim=True)


def _not_normalised(affinity: Tensor, bias: Tensor, n_activated: int) -> Tensor:
    return affinity.gather(-1, (affinity + bias).topk(n_activated, dim=-1).indices)


def _normalised_over_all(affinity: Tensor, bias: Tensor, n_activated: int) -> Tensor:
    chosen = _not_normalised(affinity, bias, n_activated)
    return chosen / affinity.sum(dim=-1, keepdim=True)


def _mla(attention: MLAConfig, dim: int, *, change: int) -> int:
    return attention_params(attention, dim) + change


def _mla_without_norms(attention: MLAConfig, dim: int) -> int:
    return _mla(
        attention, dim, change=-(attention.q_lora_rank or 0) - attention.kv_lora_rank
    )


def _mla_key_per_head(attention: MLAConfig, dim: int) -> int:
    extra = (attention.n_heads - 1) * attention.qk_rope_head_dim * dim
    return _mla(attention, dim, change=extra)


def _mla_always_compressed(attention: MLAConfig, dim: int) -> int:
    rank = 1536
    query = rank * (dim + 1 + attention.n_heads * attention.qk_head_dim)
    if attention.q_lora_rank is not None:
        return attention_params(attention, dim)
    plain = dim * attention.n_heads * attention.qk_head_dim
    return _mla(attention, dim, change=query - plain)


def mtp_pairs(tokens: list) -> tuple[list, list]:
    """Return what the MTP module is given, and what it predicts, by position."""
    return tokens[1:-1], tokens[2:]


def _gap(cfg: ModelConfig) -> float:
    return cfg.n_params() / cfg.n_active_params()


LITE = PRESETS["v2-lite-16b"]

SPARSE = replace(
    LITE,
    moe=replace(
        LITE.moe,
        n_routed_experts=550,
        n_activated_experts=1,
        n_shared_experts=0,
        moe_inter_dim=172,
    ),
)
"""An answer to "sparse_giant": its routers cost as much as its active experts."""


EXERCISES = (
    Exercise(
        name="checkpoint_terabytes",
        kind="write",
        title="How large is the file?",
        difficulty=1,
        minutes=3,
        task="Write `terabytes(n_params, bits)`: the size in TB (10¹² bytes) of a file "
        "with `n_params` parameters of `bits` bits each.",
        stub="def terabytes(n_params, bits):\n    ...",
        cases=(
            Case(
                given="671e9 parameters in 8 bits",
                args=(671_000_000_000, 8),
                expected=0.671,
            ),
            Case(
                given="671e9 parameters in 16 bits",
                args=(671_000_000_000, 16),
                expected=1.342,
            ),
            Case(
                given="16e9 parameters in 4 bits",
                args=(16_000_000_000, 4),
                expected=0.008,
            ),
        ),
        misconceptions=(
            Misconception(
                lambda n_params, bits: n_params * bits / 1e12,
                "that is terabits, eight to a terabyte: here the “5.4 TB” come from",
            ),
            Misconception(
                lambda n_params, bits: n_params * bits / 8 / 2**40,
                "that is TiB: a TB is 10¹² bytes",
            ),
            Misconception(
                lambda n_params, bits: n_params * bits / 8 / 1e9, "that is GB"
            ),
            Misconception(
                lambda n_params, bits: n_params * bits / 8,
                "those are bytes: a TB is 10¹² of them",
            ),
        ),
        hints=("How many bytes are `bits` bits?", "Divide by 8, then by 10¹²."),
        solution=terabytes,
    ),
    Exercise(
        name="mla_params",
        kind="write",
        title="Count one MLA layer",
        difficulty=3,
        minutes=15,
        task="Write `mla_params(attention, dim)`: all parameters of one layer of "
        "latent attention, its two inner norms included. `attention` has `n_heads`, "
        "`q_lora_rank` (None: queries are not compressed), `kv_lora_rank`, "
        "`qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim`.",
        stub="def mla_params(attention, dim):\n    ...",
        cases=(
            Case(
                given="DeepSeek-V3",
                args=(PRESETS["v3-671b"].attention, 7168),
                expected=187_107_328,
            ),
            Case(
                given="DeepSeek-V2",
                args=(PRESETS["v2-236b"].attention, 5120),
                expected=149_227_520,
            ),
            Case(
                given="V2-Lite, which has no query compression",
                args=(PRESETS["v2-lite-16b"].attention, 2048),
                expected=13_763_072,
            ),
        ),
        misconceptions=(
            Misconception(
                _mla_without_norms,
                "the norms of the query rank and of the KV latent are missing",
            ),
            Misconception(
                _mla_key_per_head, "all heads share one rotary key: it is not per head"
            ),
            Misconception(
                _mla_always_compressed,
                "with q_lora_rank None, queries come from one matrix",
            ),
            *left_out(),
        ),
        hints=(
            "Down and up for the query, down and up for keys and values, and an "
            "output matrix: five matrices, two norms.",
            "Down for keys and values: `dim × (kv_lora_rank + qk_rope_head_dim)`. Up: "
            "`kv_lora_rank × n_heads × (qk_nope_head_dim + v_head_dim)`.",
            "A norm has one weight for each value it normalises: `q_lora_rank` and "
            "`kv_lora_rank`.",
        ),
        solution=attention_params,
    ),
    Exercise(
        name="router_weights",
        kind="fix",
        title="The bias that leaked",
        difficulty=2,
        minutes=8,
        task="This router balances its experts, but the model gets worse. The "
        "balancing bias may take part in the choice of experts and nowhere else. Find "
        "the bug.",
        stub='''def weights_of(affinity, bias, n_activated):
    """Weights of the chosen experts; affinity (n, e), bias (e)."""
    weights, experts = (affinity + bias).topk(n_activated, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True)''',
        cases=(
            Case(
                given="affinity 0.8, 0.6, 0.2 and bias 0, 0, 1",
                args=(
                    torch.tensor([[0.8, 0.6, 0.2]]),
                    torch.tensor([0.0, 0.0, 1.0]),
                    2,
                ),
                expected=[[0.2, 0.8]],
            ),
            Case(
                given="affinity 0.3, 0.1, 0.5, 0.2 and bias 0.5, 0, -1, 0",
                args=(
                    torch.tensor([[0.3, 0.1, 0.5, 0.2]]),
                    torch.tensor([0.5, 0.0, -1.0, 0.0]),
                    2,
                ),
                expected=[[0.6, 0.4]],
            ),
        ),
        misconceptions=(
            Misconception(
                _chosen_only, "now the bias does nothing: it must still choose"
            ),
            Misconception(
                _not_normalised, "the weights of the chosen experts must sum to 1"
            ),
            Misconception(
                _normalised_over_all,
                "normalise over the chosen experts, not over all of them",
            ),
        ),
        hints=(
            "Print the weights with bias 0 and with bias 1. Which should differ?",
            "`topk` returns values and indices. Only indices may come from the sum.",
            "Take the indices, then `affinity.gather(-1, experts)`.",
        ),
        solution=weights_of,
        because="a bias in the weights would scale an expert to steer traffic.",
    ),
    Exercise(
        name="mtp_pairs",
        kind="fix",
        title="One step short",
        difficulty=2,
        minutes=6,
        task="At position i the MTP module combines the main model's state, which has "
        "read token i, with one token that it is given, and predicts the next one. "
        "`mtp_pairs(tokens)` returns what it is given and what it should predict, for "
        "each position that has both. Its loss falls to almost nothing within "
        "minutes. Find the bug.",
        stub='''def mtp_pairs(tokens):
    """(given, wanted): two lists with an entry for each position."""
    given = tokens[2:]
    wanted = tokens[2:]
    return given, wanted''',
        cases=(
            Case(
                given="tokens 10, 11, 12, 13, 14",
                args=([10, 11, 12, 13, 14],),
                expected=[[11, 12, 13], [12, 13, 14]],
            ),
            Case(
                given="the letters of “tour”",
                args=(["t", "o", "u", "r"],),
                expected=[["o", "u"], ["u", "r"]],
            ),
            Case(
                given="three tokens, the fewest that have a pair",
                args=([5, 3, 1],),
                expected=[[3], [1]],
            ),
        ),
        misconceptions=(
            Misconception(
                lambda tokens: (tokens[:-2], tokens[2:]),
                "the main model's state has read that token already: give it the next",
            ),
            Misconception(
                lambda tokens: (tokens[:-1], tokens[1:]),
                "that is the main model's shift: MTP predicts one token further",
            ),
            Misconception(
                lambda tokens: (tokens[1:], tokens[2:]),
                "the last token has no next one to predict: leave it out of what is "
                "given",
            ),
            Misconception(
                lambda tokens: (tokens[1:-1], tokens[1:-1]),
                "it is still given what it should predict",
            ),
        ),
        hints=(
            "A loss that falls to nothing: what does the module see that it should "
            "not?",
            "At position 0 of “tour” the state has read `t`. Given `o`, predict `u`.",
            "`given` starts one token earlier than `wanted`, and ends one earlier.",
        ),
        solution=mtp_pairs,
        because="state of t, given o, predicts u: two tokens beyond what was read.",
    ),
    Exercise(
        name="sparse_giant",
        kind="target",
        title="Much to know, little to do",
        difficulty=3,
        minutes=12,
        task="Change nothing but the experts of V2-Lite, "
        "`replace(lite, moe=replace(lite.moe, …))`, so that of 10 to 16 billion "
        "parameters at most 1 billion work on a token. Its experts are "
        "`n_routed_experts`, `n_activated_experts`, `n_shared_experts` and "
        "`moe_inter_dim`, their width. The score is the total divided by what works "
        "on a token. Finer experts raise it only up to a point: find what stops them.",
        stub='lite = PRESETS["v2-lite-16b"]\nmy_config = None',
        cases=(
            Case(
                given="the total",
                measure=lambda cfg: cfg.n_params() / 1e9,
                at_least=10,
                unit="billion",
            ),
            Case(
                given="the total",
                measure=lambda cfg: cfg.n_params() / 1e9,
                at_most=16,
                unit="billion",
            ),
            Case(
                given="what works on one token",
                measure=lambda cfg: cfg.n_active_params() / 1e9,
                at_most=1,
                unit="billion",
            ),
            Case(
                given="what changed outside the experts",
                measure=partial(changed_fields, original=LITE, but="moe"),
                expected="nothing",
            ),
        ),
        misconceptions=(
            Misconception(
                LITE,
                "the model you started from: fewer experts per token, or thinner ones",
            ),
            Misconception(LITE.moe, "give a whole ModelConfig, not a part of it"),
            Misconception(
                replace(LITE, moe=None, inter_dim=43_000),
                "without experts every parameter works on every token",
            ),
        ),
        hints=(
            "Which parts does every token pass, whatever the router says? They are "
            "0.65 billion here.",
            "One activated expert and no shared one. Then `n_routed_experts * "
            "moe_inter_dim` fixes the total: trade one for the other.",
            "A router has 2048 parameters per expert, all active. The best point is "
            "where the routers cost what the active experts cost.",
        ),
        solution=SPARSE,
        because="the ratio says nothing of quality: DeepSeek activates 6 or 8 experts, "
        "and keeps shared ones, because models learn better so.",
        score=Score(of=_gap, unit="times as many stored as at work", lower_wins=False),
    ),
    Exercise(
        name="twice_the_experts",
        kind="predict",
        title="Twice as many experts",
        difficulty=2,
        minutes=5,
        task="DeepSeek-V3 gets 512 routed experts per layer instead of 256; each token "
        "still visits 8. By how many per cent do the parameters that work on a token "
        "grow? A guess within a tenth of the answer counts. First say why it is not "
        "nothing.",
        stub="percent = None",
        cases=(Case(given="", expected=0.2906, tolerance=0.1, unit="%"),),
        misconceptions=(
            Misconception(
                97.46, "so grows the total; a token still visits 8 experts, not 16"
            ),
            Misconception(0, "the experts add nothing: what scores them?"),
            Misconception(0.002906, "that is the fraction: give per cent"),
        ),
        hints=(
            "Each token still visits 8 experts. What must look at all 512?",
            "A router has a row of 7168 weights and a bias per expert, in 58 layers.",
            "58 · 256 · 7169 new parameters, of 36.6 billion.",
        ),
        solution=0.2906,
        because="the total grows by 97.5 per cent, and only the routers' new rows, "
        "106 million parameters, are active.",
    ),
)
