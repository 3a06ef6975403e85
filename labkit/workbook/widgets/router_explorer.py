"""How long an expert must starve before its bias brings it a given token."""

from copy import deepcopy

import torch
from ipywidgets import ValueWidget
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from labkit.model.moe import Router
from labkit.workbook.figures.routing import Choice, routing
from labkit.workbook.widgets.controls import slider

BIAS_PER_STEP = 0.001
"""Rate gamma of DeepSeek-V3 (section 4.2)."""


class RouterExplorer:
    """One token, one router, and the bias that an underloaded expert gathers.

    The bias of the expert that is watched rises by gamma with every step in which it
    saw too few tokens; all other biases are 0.
    """

    def __init__(self, router: Router, token: Float[Tensor, "1 d"]) -> None:
        self._router, self._token = deepcopy(router), token
        moe = router.moe
        with torch.no_grad():
            self.affinity = router(token)[2][0]
        self._n_experts, self._n_groups = moe.n_routed_experts, moe.n_expert_groups

    def controls(self, *, expert: int, starved: int) -> dict[str, ValueWidget]:
        """Return the controls: which expert, and for how many steps it starves."""
        last = self._n_experts - 1
        return {
            "expert": slider("expert that starves", (0, last), value=expert),
            "starved": slider(
                "underloaded for", (0, 1500), value=starved, step=25, unit="steps"
            ),
        }

    def decide(self, expert: int, starved: int) -> tuple[Float[Tensor, "k"], list[int]]:
        """Return the weights and the experts of the token, the best score first."""
        with torch.no_grad():
            bias = self._router.bias
            bias.zero_()[expert] = starved * BIAS_PER_STEP
            weights, experts, affinity = self._router(self._token)
            order = (affinity[0] + bias)[experts[0]].argsort(descending=True)
        return weights[0][order], experts[0][order].tolist()

    def draw(self, expert: int, starved: int) -> Figure:
        """Return all scores, with what the bias adds to the expert that is watched."""
        _, experts = self.decide(expert, starved)
        scores = self.affinity.clone()
        scores[expert] += starved * BIAS_PER_STEP
        is_in = "visits" if expert in experts else "passes by"
        choice = Choice(
            scores=scores.tolist(),
            chosen=experts,
            open_groups=self.open_groups(scores),
            n_groups=self._n_groups,
        )
        return routing(
            choice,
            title=f"After {starved:,} underloaded steps the token {is_in} expert "
            f"{expert}, in group {self._group(expert)}",
            watched=(expert, float(self.affinity[expert])),
        )

    def open_groups(self, scores: Float[Tensor, "e"]) -> list[int]:
        """Return the groups whose two best experts sum highest."""
        best = scores.unflatten(0, (self._n_groups, -1)).topk(2).values.sum(-1)
        return best.topk(self._router.moe.n_limited_groups).indices.tolist()

    def describe(self, expert: int, starved: int) -> str:
        """Return what the bias changed, and what it left alone."""
        weights, experts = self.decide(expert, starved)
        affinity, bias = float(self.affinity[expert]), starved * BIAS_PER_STEP
        start = (
            f"Expert {expert} has affinity {affinity:.3f}, and bias {bias:.3f} after "
            f"{starved:,} steps: "
        )
        if expert not in experts:
            why = self._obstacle(expert, experts, bias)
            return f"{start}not among the {len(experts)} chosen: {why}."
        rank = 1 + experts.index(expert)
        weight = float(weights[rank - 1])
        total = float(self.affinity[experts].sum())
        return (
            f"{start}chosen, number {rank} of {len(experts)} by score. Its weight "
            f"{weight:.3f} = {self._router.moe.route_scale:g} · {affinity:.3f} / "
            f"{total:.3f} does not contain the bias."
        )

    def _obstacle(self, expert: int, chosen: list[int], bias: float) -> str:
        """Return why an expert was not chosen: its group, its score, or both."""
        scores = self.affinity.clone()
        scores[expert] += bias
        n_beaten = int((scores[chosen] < scores[expert]).sum())
        group = self._group(expert)
        if group in self.open_groups(scores):
            return "its score is below theirs"
        if not n_beaten:
            return f"group {group} is closed, and its score is below theirs"
        return f"group {group} is closed, though its score beats {n_beaten} of them"

    def _group(self, expert: int) -> int:
        return expert // (self._n_experts // self._n_groups)
