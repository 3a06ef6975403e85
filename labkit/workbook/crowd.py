"""A router of DeepSeek-V3's size without a model: tokens with a taste, and a bias.

An affinity is the logistic function of two numbers: the taste of one token for one
expert, drawn from a normal distribution, and the popularity of the expert with all
tokens, which is `skew` times as wide. Tokens choose and the bias follows as in
`labkit.model.moe` and `Transformer.update_router_bias`; nothing is learnt.

Affinities are rounded to 2^-20, so that all machines count the same tokens.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int

from labkit.config import PRESETS

MOE = PRESETS["v3-671b"].moe

N_EXPERTS, N_GROUPS, K = (
    MOE.n_routed_experts,
    MOE.n_expert_groups,
    MOE.n_activated_experts,
)

N_TOKENS = 2048
"""That come again and again, in the same order."""

PER_STEP = 128
"""Of which each step sees so many: few, so that a control is answered at once."""

CYCLE = N_TOKENS // PER_STEP
"""Steps in which every token comes once."""

N_STEPS = 14 * CYCLE

IDLE = 0.1
"""Share of the mean load below which an expert counts as idle."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Crowd:
    """How a bias steered the tokens, and what they choose in the end."""

    loads: Int[np.ndarray, "s e"]
    """Tokens that chose each expert, step by step."""

    chosen: Bool[np.ndarray, "n e"]
    """What all tokens choose by the last bias, as if it were frozen then."""

    unsteered: Int[np.ndarray, "e"]
    """Tokens of each expert, of all tokens, without bias."""

    bias: Float[np.ndarray, "e"]

    @property
    def load(self) -> Int[np.ndarray, "e"]:
        """Tokens of each expert, of all tokens, by the last bias."""
        return self.chosen.sum(axis=0)

    @property
    def history(self) -> list[tuple[int, float]]:
        """Pairs of a step and the busiest expert's load by the mean, up to that step.

        Before the first step all tokens are asked; then each pair is of the last
        `CYCLE` steps, in which every token came once.
        """
        sums = self.loads.cumsum(axis=0)
        sums[CYCLE:] -= sums[:-CYCLE].copy()
        ratios = (sums.max(axis=1) / sums.mean(axis=1))[CYCLE - 1 :].tolist()
        return [(0, busiest(self.unsteered)), *enumerate(ratios, start=CYCLE)]


def busiest(load: Int[np.ndarray, "e"]) -> float:
    """Return the busiest expert's load by the mean.

    >>> busiest(np.array([1, 2, 3]))
    1.5
    """
    return float(load.max() / load.mean())


def steer(skew: float, gamma: float, n_limited: int, n_steps: int = N_STEPS) -> Crowd:
    """Return what the bias makes of a crowd.

    Args:
        skew: spread of the experts' popularity, by that of one token's tastes.
        gamma: what an expert's bias moves by in a step.
        n_limited: groups that a token may choose from.
        n_steps: of the bias.
    """
    liked = affinities(skew)
    bias, loads = np.zeros(N_EXPERTS, np.float32), []
    for step in range(n_steps):
        start = step % CYCLE * PER_STEP
        scores = liked[start : start + PER_STEP] + bias
        loads.append(choose(scores, n_limited).sum(axis=0))
        bias += np.float32(gamma) * np.sign(loads[-1].mean() - loads[-1])
    return Crowd(
        loads=np.stack(loads),
        chosen=choose(liked + bias, n_limited),
        unsteered=choose(liked, n_limited).sum(axis=0),
        bias=bias,
    )


def affinities(skew: float) -> Float[np.ndarray, "n e"]:
    """Return how much each token likes each expert, without bias."""
    taste, popularity = _drawn()
    affinity = 1 / (1 + np.exp(-(taste + skew * popularity)))
    return (np.round(affinity * 2**20) / 2**20).astype(np.float32)


def choose(scores: Float[np.ndarray, "n e"], n_limited: int) -> Bool[np.ndarray, "n e"]:
    """Return which experts each token visits, as `Router.choose` finds them.

    The k-th best score is the bar; experts with the same score as the k-th all pass.
    """
    if n_limited < N_GROUPS:
        grouped = scores.reshape(len(scores), N_GROUPS, -1)
        size = grouped.shape[-1]
        best = np.partition(grouped, size - 2, axis=-1)[..., -2:].sum(axis=-1)
        bar = np.partition(best, N_GROUPS - n_limited, axis=-1)[:, -n_limited, None]
        is_open = (best >= bar)[..., None]
        scores = np.where(is_open, grouped, -np.inf).reshape(scores.shape)
    return scores >= np.partition(scores, N_EXPERTS - K, axis=-1)[:, -K, None]


@lru_cache
def _drawn() -> tuple[Float[np.ndarray, "n e"], Float[np.ndarray, "e"]]:
    """Return the tastes of all tokens, and the popularity of all experts."""
    random = np.random.default_rng(0)
    popularity = random.normal(size=N_EXPERTS)
    return random.normal(size=(N_TOKENS, N_EXPERTS)), popularity
