"""Tokens that travel to experts and back, on two and four ranks, without a model."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.config import MoEConfig
from labkit.model.moe import MoE, Router
from labkit.parallel.communication.count import count_communication
from labkit.parallel.communication.exchange import Exchange, expert_exchange
from labkit.parallel.communication.exchange_rows import crossing, rows_sent
from labkit.parallel.communication.exchange_trip import Trip
from labkit.parallel.communication.payload import PAYLOADS, Payload, RowFormat
from labkit.parallel.expert import join, of_own_experts
from labkit.parallel.launch import launch

N_EXPERTS, DIM, K = 8, 33, 3

NODE_LIMITED = MoEConfig(
    n_routed_experts=16,
    n_activated_experts=6,
    moe_inter_dim=1,
    n_expert_groups=2,
    n_limited_groups=1,
)


class Scaling(nn.Module):
    """Experts whose results are easy to check: the first doubles, the next triples…"""

    def __init__(self, own: range) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.arange(own.start, own.stop) + 2.0)

    def forward(self, x, weights, experts):
        return (x.unsqueeze(1) * (weights * self.factors[experts]).unsqueeze(-1)).sum(1)


@dataclass
class Batch:
    """Tokens of one rank, and what is asked of their results."""

    x: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    goal: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x, self.weights


def drawn(n_tokens: int, experts: Callable[..., torch.Tensor], rank: int) -> Batch:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(n_tokens, DIM, generator=generator, requires_grad=True)
    weights = torch.rand(n_tokens, K, generator=generator, requires_grad=True)
    goal = torch.randn(n_tokens, DIM, generator=generator)
    return Batch(x, weights, experts(n_tokens, generator), goal)


def anywhere(n_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Return different experts of each token, all equally likely."""
    shape = (n_tokens, N_EXPERTS)
    return torch.rand(shape, generator=generator).topk(K).indices


def at_the_end(n_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Return the last experts of all, for every token: the other ranks get none."""
    return torch.arange(N_EXPERTS - K, N_EXPERTS).expand(n_tokens, K)


LENGTHS = {"equal": (5, 5, 5, 5), "unequal": (1, 9, 0, 4), "none": (0, 0, 0, 0)}

WAYS = {
    "once a choice": {"deduplicate": False},
    "once a rank": {},
    "two hops": {"n_nodes": 2},
}


def through(exchange: Exchange, experts: nn.Module, batch: Batch) -> torch.Tensor:
    journey = exchange.send(batch.x, batch.weights, batch.experts)
    return journey.back(of_own_experts(experts, journey.arrived(), exchange.own))


def worst_error(
    exchange: Exchange, lengths: tuple[int, ...], choose: Callable
) -> float:
    """Return how far results and all gradients are from those of all experts here."""
    rank = dist.get_rank()
    spread, alone = Scaling(exchange.own), Scaling(range(N_EXPERTS))
    results = []
    for compute in (
        lambda batch: through(exchange, spread, batch),
        lambda batch: alone(batch.x, batch.weights, batch.experts),
    ):
        batch = drawn(lengths[rank], choose, rank)
        out = compute(batch)
        (out * batch.goal).sum().backward()
        results.append((out.detach(), *(leaf.grad for leaf in batch.leaves)))
    everyone_s = alone.factors.grad
    everyone_s = torch.zeros(N_EXPERTS) if everyone_s is None else everyone_s
    dist.all_reduce(everyone_s)
    own = everyone_s[exchange.own.start : exchange.own.stop]
    pairs = [*zip(*results, strict=True), (spread.factors.grad, own)]
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def exchange_of(**options: object) -> Exchange:
    return expert_exchange(range(dist.get_world_size()), N_EXPERTS, **options)


def errors() -> dict[str, float]:
    """Return the worst error of each way, each spread of tokens, each router."""
    found = {}
    for way, options in WAYS.items():
        exchange = exchange_of(**options)
        for kind, lengths in LENGTHS.items():
            for choose in (anywhere, at_the_end):
                name = f"{way}, {kind}, {choose.__name__}"
                found[name] = worst_error(exchange, lengths, choose)
    return found


def sent_and_predicted(way: str, payload: str) -> tuple[float, float]:
    """Return the bytes of this rank, forward and backward, counted and predicted."""
    rank, n_ranks, options = dist.get_rank(), dist.get_world_size(), WAYS[way]
    exchange = exchange_of(payload=payload, **options)
    batches = [drawn(6, anywhere, rank) for rank in range(n_ranks)]
    with count_communication() as counted:
        out = through(exchange, Scaling(exchange.own), batches[rank])
        out.sum().backward()
    rows = rows_sent(torch.stack([b.experts for b in batches]), N_EXPERTS, **options)
    k, formats = 1 if "deduplicate" in options else K, PAYLOADS[payload]
    there, back = (
        {"dim": DIM, "format": name} for name in (formats.there, formats.back)
    )
    outward = RowFormat(n_weights=k, n_experts=k, **there).n_bytes
    outward += RowFormat(**there).n_bytes  # the gradient of results
    homeward = RowFormat(**back).n_bytes
    homeward += RowFormat(n_weights=k, **back).n_bytes  # and that of tokens
    sent = int(rows[rank].sum() - rows[rank, rank])
    came = int(rows[:, rank].sum() - rows[rank, rank])
    counts = 8 * sum(level.size - 1 for level in exchange.levels)
    return counted.sent_bytes, outward * sent + homeward * came + counts


def order_of_events() -> list[str]:
    """Return when this rank sends, waits and computes the shared expert."""
    events: list[str] = []
    post, arrived = Trip._post, Trip._arrived

    def noted(name: str, method: Callable) -> Callable:
        def call(trip: Trip, *args: object) -> object:
            events.append(f"{name} {type(trip).__name__.lower()}")
            return method(trip, *args)

        return call

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            events.append("shared")
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            events.append("shared")
            return 2 * grad

    torch.manual_seed(0)
    moe = MoE(
        DIM, MoEConfig(n_routed_experts=8, n_activated_experts=3, moe_inter_dim=5)
    )
    for parameter in moe.parameters():
        nn.init.normal_(parameter)
    moe.shared_experts.forward = Noted.apply
    exchange = exchange_of()
    moe.experts.w13 = nn.Parameter(moe.experts.w13[list(exchange.own)])
    moe.experts.w2 = nn.Parameter(moe.experts.w2[list(exchange.own)])
    join(moe, exchange)
    Trip._post, Trip._arrived = noted("send", post), noted("wait", arrived)
    try:
        moe(torch.randn(2, 4, DIM, requires_grad=True))[0].sum().backward()
    finally:
        Trip._post, Trip._arrived = post, arrived
    return events


def in_two_threads() -> float:
    """Return the worst error of passes at once, in another order on every rank."""
    exchange, rank = exchange_of(), dist.get_rank()
    experts = Scaling(exchange.own)
    batches = [drawn(7, anywhere, rank + 100 * i) for i in range(12)]
    outs = [through(exchange, experts, batch) for batch in batches[:6]]

    def backward() -> None:
        for index, (out, batch) in enumerate(zip(outs, batches, strict=False)):
            time.sleep(0.01 * ((index + rank) % 3))
            (out * batch.goal).sum().backward()

    behind = threading.Thread(target=backward)
    behind.start()
    later = []
    for index, batch in enumerate(batches[6:]):
        time.sleep(0.01 * ((index + 2 * rank) % 3))
        later.append(through(exchange, experts, batch))
    behind.join()
    alone, worst = Scaling(range(N_EXPERTS)), 0.0
    for batch, out in zip(batches, outs + later, strict=True):
        expected = alone(batch.x, batch.weights, batch.experts)
        worst = max(worst, float((out - expected).abs().max()))
    for batch in batches[:6]:
        given = alone(batch.x, batch.weights, batch.experts)
        (expected,) = torch.autograd.grad((given * batch.goal).sum(), batch.x)
        worst = max(worst, float((batch.x.grad - expected).abs().max()))
    return worst


def precisions() -> dict[str, tuple[torch.Tensor, ...]]:
    """Return results and gradients of one batch in each payload."""
    found = {}
    for name in (*PAYLOADS, "back"):
        payload = Payload(there="fp32", back="bf16") if name == "back" else name
        exchange = exchange_of(payload=payload)
        batch = drawn(6, anywhere, dist.get_rank())
        out = through(exchange, Scaling(exchange.own), batch)
        (out * batch.goal).sum().backward()
        found[name] = (out.detach(), *(leaf.grad for leaf in batch.leaves))
    return found


def on_two_ranks() -> dict[str, object]:
    return {"events": order_of_events(), "precisions": precisions()}


def on_four_ranks() -> dict[str, object]:
    sent = {
        (way, payload): sent_and_predicted(way, payload)
        for way in WAYS
        for payload in PAYLOADS
    }
    with pytest.raises(ValueError, match="deduplicate must be True") as caught:
        exchange_of(n_nodes=2, deduplicate=False)
    with pytest.raises(ValueError, match="ranks that exchange tokens must be") as away:
        expert_exchange([dist.get_rank() ^ 1], N_EXPERTS)
    return {
        "errors": errors(),
        "sent": sent,
        "threads": in_two_threads(),
        "refusals": (str(caught.value), str(away.value)),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, object]]:
    return launch(on_two_ranks, 2, timeout=300)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, object]]:
    return launch(on_four_ranks, 4, timeout=300)


def test_results_and_gradients_are_those_of_experts_in_one_place(four_ranks):
    for seen in four_ranks:
        assert len(seen["errors"]) == 18
        assert max(seen["errors"].values()) < 2e-5, seen["errors"]


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_predicted_from_the_choices(four_ranks, way, payload):
    for seen in four_ranks:
        counted, predicted = seen["sent"][way, payload]
        assert counted == predicted > 0


def test_a_row_goes_once_to_a_rank_with_several_of_its_experts(four_ranks):
    for payload in PAYLOADS:
        plain, once = (
            sum(seen["sent"][way, payload][0] for seen in four_ranks)
            for way in ("once a choice", "once a rank")
        )
        assert once < plain


def test_the_shared_expert_is_computed_while_tokens_travel_in_both_passes(two_ranks):
    forward = ["send outward", "shared", "wait outward", "send homeward"]
    # Backward: results' gradients go out, tokens' gradients come back.
    backward = ["send outward", "wait outward", "send homeward", "shared"]
    for seen in two_ranks:
        assert seen["events"] == [
            *forward,
            "wait homeward",
            *backward,
            "wait homeward",
        ]


def test_both_passes_may_run_at_once_in_two_threads(four_ranks):
    for seen in four_ranks:
        assert seen["threads"] < 2e-5


def test_a_payload_rounds_what_goes_to_experts_in_both_passes(two_ranks):
    for seen in two_ranks:
        exact, bf16, fp8, back = seen["precisions"].values()
        for ours, rounded, narrow in zip(exact, bf16, fp8, strict=True):
            scale = ours.abs().max()
            assert 1e-4 < (ours - rounded).abs().max() / scale < 2e-2
            assert 1e-3 < (ours - narrow).abs().max() / scale < 1e-1
        # Weights' gradients depend on what went out alone, and that was exact.
        torch.testing.assert_close(back[2], exact[2])
        assert not torch.equal(back[1], exact[1])


def test_impossible_exchanges_are_one_sentence(four_ranks):
    assert four_ranks[0]["refusals"] == (
        "deduplicate must be True with nodes, because a row goes to each once; got "
        "False and n_nodes=2. Set n_nodes=1.",
        "ranks that exchange tokens must be those that call this; got [1] on rank 0. "
        "Call it with each rank's own group.",
    )


def test_node_limited_fp8_rows_take_less_than_a_seventh_of_plain_fp32_ones():
    tokens, dim = 512, 256
    router = Router(1, NODE_LIMITED)
    generator = torch.Generator().manual_seed(0)
    affinity = torch.rand(4 * tokens, 16, generator=generator)
    experts = router.choose(affinity).unflatten(0, (4, tokens))
    free = affinity.topk(6).indices.unflatten(0, (4, tokens))
    plain = crossing(rows_sent(free, 16, deduplicate=False), 2).between
    limited = crossing(rows_sent(experts, 16, n_nodes=2), 2).between
    exact = RowFormat(dim=dim, n_weights=1, n_experts=1).n_bytes + 4 * dim
    narrow = RowFormat(dim=dim, format="fp8", n_weights=6, n_experts=6).n_bytes
    narrow += RowFormat(dim=dim, format="bf16").n_bytes
    assert limited * narrow < 0.15 * plain * exact
