"""The router explorer: a bias moves the choice, the weight stays."""

import pytest
import torch

from labkit.config import MoEConfig
from labkit.model.moe import Router
from labkit.workbook.widgets.router_explorer import RouterExplorer

MOE = MoEConfig(
    n_routed_experts=8,
    n_activated_experts=2,
    moe_inter_dim=1,
    n_expert_groups=4,
    n_limited_groups=2,
    route_scale=2.5,
)


@pytest.fixture
def explorer():
    """A token with the affinities 0.1, 0.2, …, 0.8."""
    router = Router(1, MOE).requires_grad_(False)
    router.weight[:, 0] = torch.logit(torch.arange(1, 9) / 10)
    return RouterExplorer(router, torch.ones(1, 1))


def test_without_bias_the_best_two_are_chosen(explorer):
    weights, experts = explorer.decide(0, 0)

    assert experts == [7, 6]
    torch.testing.assert_close(weights, 2.5 * torch.tensor([0.8, 0.7]) / 1.5)
    assert explorer.describe(0, 0) == (
        "Expert 0 has affinity 0.100, and bias 0.000 after 0 steps: not among the 2 "
        "chosen: group 0 is closed, and its score is below theirs."
    )


@pytest.mark.parametrize(
    ("expert", "starved", "why"),
    [
        (0, 500, "group 0 is closed, and its score is below theirs."),  # 0.6
        (0, 650, "group 0 is closed, though its score beats 1 of them."),  # 0.75 > 0.7
        (4, 0, "its score is below theirs."),  # group 2 is open, and 0.5 < 0.7
    ],
)
def test_an_expert_that_is_left_out_learns_what_stands_in_its_way(
    explorer, expert, starved, why
):
    assert explorer.describe(expert, starved).endswith(f"not among the 2 chosen: {why}")


def test_the_bias_chooses_and_the_affinity_weighs(explorer):
    assert explorer.describe(0, 1000) == (
        "Expert 0 has affinity 0.100, and bias 1.000 after 1,000 steps: chosen, number "
        "1 of 2 by score. Its weight 0.278 = 2.5 · 0.100 / 0.900 does not contain the "
        "bias."
    )


def test_more_bias_leaves_the_weight(explorer):
    (first, _), (again, _) = explorer.decide(0, 1000), explorer.decide(0, 1500)

    assert torch.equal(first, again)


def test_open_groups_are_those_whose_best_two_sum_highest(explorer):
    scores = torch.tensor([0.9, 0.0, 0.5, 0.5, 0.1, 0.1, 0.6, 0.6])

    assert sorted(explorer.open_groups(scores)) == [1, 3]


def test_the_router_that_was_given_keeps_its_biases():
    router = Router(1, MOE).requires_grad_(False)
    router.weight.fill_(1.0)
    RouterExplorer(router, torch.ones(1, 1)).decide(3, 500)

    assert not router.bias.any()


def test_the_figure_says_whether_the_token_visits(explorer):
    titles = [explorer.draw(0, steps).get_suptitle() for steps in (0, 1000)]

    assert titles == [
        "After 0 underloaded steps the token passes by expert 0, in group 0",
        "After 1,000 underloaded steps the token visits expert 0, in group 0",
    ]


def test_the_controls_start_where_they_are_told(explorer):
    controls = explorer.controls(expert=3, starved=250)

    assert {name: control.value for name, control in controls.items()} == {
        "expert": 3,
        "starved": 250,
    }
    assert controls["starved"].description == "underloaded for (steps)"
