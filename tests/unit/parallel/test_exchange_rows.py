"""Rows that cross links, counted from choices."""

import pytest
import torch

from labkit.config import MoEConfig
from labkit.model.moe import Router
from labkit.parallel.communication.cluster import Cluster, Link
from labkit.parallel.communication.dispatch import expert_dispatch
from labkit.parallel.communication.exchange import levels_of
from labkit.parallel.communication.exchange_rows import crossing, rows_sent


def drawn(moe: MoEConfig, n_ranks: int, n_tokens: int) -> torch.Tensor:
    """Return choices of tokens whose affinities are independent."""
    generator = torch.Generator().manual_seed(5)
    shape = (n_ranks * n_tokens, moe.n_routed_experts)
    experts = Router(1, moe).choose(torch.rand(shape, generator=generator))
    return experts.unflatten(0, (n_ranks, n_tokens))


MOE = MoEConfig(n_routed_experts=16, n_activated_experts=6, moe_inter_dim=1)
LIMITED = MoEConfig(
    n_routed_experts=16,
    n_activated_experts=6,
    moe_inter_dim=1,
    n_expert_groups=2,
    n_limited_groups=1,
)


def test_plain_rows_are_one_for_each_choice():
    experts = drawn(MOE, 4, 10)
    rows = rows_sent(experts, 16, deduplicate=False)
    assert rows.sum() == experts.numel()
    assert rows[2, 3] == ((experts[2] >= 12).sum())


def test_a_rank_gets_a_row_once():
    experts = drawn(MOE, 4, 10)
    rows = rows_sent(experts, 16)
    assert rows[2, 3] == (experts[2] >= 12).any(dim=-1).sum()


def test_a_row_crosses_to_a_node_once_and_is_handed_on_by_the_sender_s_place():
    experts = torch.tensor([[[4, 6, 7]]] * 4)  # of ranks 2 and 3, on the second node
    rows = rows_sent(experts, 8, n_nodes=2)
    # From ranks 0 and 1 across, where 2 and 3 keep a copy and hand one on.
    assert rows.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 3, 2], [0, 0, 2, 3]]
    assert crossing(rows, 2) == (2, 4)


def test_as_many_rows_cross_to_a_node_as_the_tokens_that_need_it():
    experts = drawn(MOE, 4, 50)
    needs = torch.stack([(experts < 8).any(-1), (experts >= 8).any(-1)])  # (nodes r n)
    between = needs[1, :2].sum() + needs[0, 2:].sum()
    assert crossing(rows_sent(experts, 16, n_nodes=2), 2).between == between


@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("moe", [MOE, LIMITED])
def test_even_routers_send_what_the_cost_model_expects(moe, deduplicate):
    n_nodes, n_tokens = 2, 4000
    link = Link(latency_seconds=0, bytes_per_second=1)
    cluster = Cluster(link=link, network=link, n_nodes=n_nodes, gpus_per_node=2)
    cost = expert_dispatch(
        cluster, moe, n_tokens=n_tokens, token_bytes=1, deduplicate=deduplicate
    )
    hops = n_nodes if deduplicate else 1
    experts = drawn(moe, 4, n_tokens)
    rows = rows_sent(experts, 16, n_nodes=hops, deduplicate=deduplicate)
    between, inside = crossing(rows, n_nodes)
    assert between / n_nodes == pytest.approx(cost.node_bytes, rel=0.03)
    assert inside / 4 == pytest.approx(cost.link_bytes, rel=0.03)


def test_the_last_rank_may_have_fewer_experts():
    assert levels_of(0, 2, 5)[0].members(torch.tensor([[2, 3, 4]])).tolist() == [
        [0, 1, 1]
    ]


def test_a_rank_without_experts_is_refused():
    rule = "ep must leave an expert for each rank, .* take 2; got ep=4 and 6 experts"
    with pytest.raises(ValueError, match=rule):
        levels_of(0, 4, 6)


def test_unequal_nodes_are_refused():
    rule = "n_nodes must divide the ranks .* got n_nodes=3 and 4 ranks. Set n_nodes=1"
    with pytest.raises(ValueError, match=rule):
        levels_of(0, 4, 8, n_nodes=3)
