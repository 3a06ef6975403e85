"""Router, balance and load, against the paper read as slow loops."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from labkit.config import MoEConfig
from labkit.model.moe import MoE, Router, balance_loss, expert_load

DIM = 6
V3 = MoEConfig(
    n_routed_experts=8,
    n_activated_experts=3,
    moe_inter_dim=5,
    n_expert_groups=4,
    n_limited_groups=2,
    route_scale=2.5,
)


def built(module, *args):
    layer = module(DIM, *args)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


@st.composite
def moe_configs(draw):
    n_groups = draw(st.sampled_from([1, 2, 3, 4, 8]))
    per_group = draw(st.integers(1, 4))
    n_limited = draw(st.integers(1, n_groups))
    return MoEConfig(
        n_routed_experts=n_groups * per_group,
        n_activated_experts=draw(st.integers(1, n_limited * per_group)),
        moe_inter_dim=4,
        n_expert_groups=n_groups,
        n_limited_groups=n_limited,
        score_func=draw(st.sampled_from(["sigmoid", "softmax"])),
        group_score=draw(st.sampled_from(["top2", "max"])),
        has_bias=draw(st.booleans()),
        norm_topk_prob=draw(st.booleans()),
        route_scale=draw(st.sampled_from([1.0, 2.5])),
    )


def slow_route(logits, bias, moe):
    """Return {expert: weight} of one token, by the text, and the nearest miss."""
    n = moe.n_routed_experts
    if moe.score_func == "sigmoid":
        affinity = [1 / (1 + math.exp(-u)) for u in logits]
    else:
        total = sum(math.exp(u) for u in logits)
        affinity = [math.exp(u) / total for u in logits]
    score = [affinity[i] + bias[i] for i in range(n)]
    size = n // moe.n_expert_groups
    groups = [range(g * size, (g + 1) * size) for g in range(moe.n_expert_groups)]

    def group_score(group):
        best = sorted((score[i] for i in group), reverse=True)
        return sum(best[:2]) if moe.group_score == "top2" else best[0]

    ranked = sorted(groups, key=group_score, reverse=True)
    margins = [
        group_score(a) - group_score(b)
        for a in ranked[: moe.n_limited_groups]
        for b in ranked[moe.n_limited_groups :]
    ]
    open_experts = [i for group in ranked[: moe.n_limited_groups] for i in group]
    open_experts.sort(key=lambda i: score[i], reverse=True)
    chosen = open_experts[: moe.n_activated_experts]
    margins += [
        score[a] - score[b]
        for a in chosen
        for b in open_experts[moe.n_activated_experts :]
    ]
    total = sum(affinity[i] for i in chosen) if moe.norm_topk_prob else 1
    weights = {i: affinity[i] / total * moe.route_scale for i in chosen}
    return weights, min(margins, default=math.inf)


@settings(max_examples=60)
@given(
    moe=moe_configs(), seed=st.integers(0, 2**31), center=st.sampled_from([0.0, -5.0])
)
def test_choice_and_weights_are_those_of_the_papers_text(moe, seed, center):
    torch.manual_seed(seed)
    router = built(Router, moe)
    bias = torch.zeros(moe.n_routed_experts)
    if moe.has_bias:
        bias = router.bias.normal_(mean=center)
    x = torch.randn(5, DIM)
    weights, experts, affinity = router(x)
    for token, logits in enumerate((x @ router.weight.T).tolist()):
        expected, margin = slow_route(logits, bias.tolist(), moe)
        assume(margin > 1e-5)  # nearer ones may be ranked either way
        found = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-4)
    total = affinity.sum(dim=-1)
    if moe.score_func == "softmax":
        torch.testing.assert_close(total, torch.ones(5))


def test_bias_moves_the_choice_but_not_the_weight():
    router = built(Router, replace(V3, n_expert_groups=1, n_limited_groups=1))
    x = torch.randn(5, DIM)
    router.bias[3] = 10.0  # any affinity is below 1, so expert 3 is always chosen
    weights, experts, _ = router(x)
    affinity = torch.sigmoid(x @ router.weight.T).gather(-1, experts)
    assert (experts == 3).any(dim=-1).all()
    torch.testing.assert_close(
        weights, 2.5 * affinity / affinity.sum(dim=-1, keepdim=True)
    )


def test_bias_has_no_gradient_and_is_no_parameter():
    router = built(Router, V3)
    weights, _, _ = router(torch.randn(5, DIM))
    weights.pow(2).sum().backward()
    assert router.weight.grad is not None
    assert not router.bias.requires_grad
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert "bias" in router.state_dict()


def test_weights_sum_to_the_route_scale():
    weights, _, _ = built(Router, V3)(torch.randn(50, DIM))
    torch.testing.assert_close(weights.sum(dim=-1), torch.full((50,), 2.5))


@pytest.mark.parametrize("center", [0.0, -3.0, 3.0])
def test_each_token_stays_within_its_groups_and_never_chooses_twice(center):
    router = built(Router, V3)
    router.bias.normal_(mean=center)
    _, experts, _ = router(torch.randn(200, DIM))
    for chosen in experts.tolist():
        assert len(set(chosen)) == 3
        assert len({expert // 2 for expert in chosen}) <= 2


def test_closed_groups_stay_closed_when_every_open_score_is_negative():
    # Masking with 0 instead of minus infinity would prefer a closed expert here.
    router = built(Router, V3)
    router.bias.fill_(-3.0)
    router.bias[:4] = -2.0  # groups 0 and 1 win for every token
    _, experts, _ = router(torch.randn(50, DIM))
    assert experts.max() < 4


def test_a_group_of_one_expert_is_scored_by_that_expert():
    moe = replace(V3, n_expert_groups=8, n_limited_groups=4)
    router = built(Router, moe)
    x = torch.randn(30, DIM)
    _, experts, affinity = router(x)
    best = affinity.topk(3).indices
    assert torch.equal(experts.sort().values, best.sort().values)


def test_affinities_are_fp32_under_bf16_and_under_autocast():
    router = built(Router, V3)
    x = torch.randn(20, DIM)
    _, _, exact = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, _, affinity = router(x)
    assert torch.equal(affinity, exact)
    router.to(torch.bfloat16)
    weights, _, affinity = router(x.bfloat16())
    logits = x.bfloat16().double() @ router.weight.double().T
    assert affinity.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(affinity, logits.sigmoid().float())


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_gradients_of_bf16_are_to_the_bit_those_through_fp32_copies(weights):
    router = built(Router, V3).to(weights)
    x = torch.randn(40, DIM).bfloat16().requires_grad_()
    leaves = x, router.weight
    copies = torch.nn.functional.linear(x.float(), router.weight.float())
    for wanted, found in zip(router.route(copies), router(x), strict=True):
        assert torch.equal(found, wanted)
        if not wanted.requires_grad:
            continue
        grad = torch.randn(wanted.shape)
        exact = torch.autograd.grad(wanted, leaves, grad, retain_graph=True)
        gradients = torch.autograd.grad(found, leaves, grad, retain_graph=True)
        assert all(map(torch.equal, gradients, exact))


def test_of_bf16_the_input_and_the_weight_are_kept_and_no_copies_of_them():
    router = built(Router, V3).bfloat16()
    x = torch.randn(40, DIM).bfloat16().requires_grad_()
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        router(x)
    wide = {tensor.data_ptr() for tensor in kept if tensor.shape[-1] == DIM}
    assert wide == {x.data_ptr(), router.weight.data_ptr()}


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_bias_stays_fp32_when_the_model_is_cast(cast):
    router = built(Router, V3)
    router.bias.uniform_(-1, 1)
    before = router.bias.clone()
    getattr(router, cast)()
    assert router.bias.dtype == torch.float32
    assert torch.equal(router.bias, before)
    assert router.weight.dtype != torch.float32


def test_bias_follows_the_model_to_another_device():
    router = built(Router, V3).to("meta", torch.bfloat16)
    assert router.bias.device.type == "meta"
    assert router.bias.dtype == torch.float32


def test_a_tiny_step_of_the_bias_is_not_lost_in_bf16():
    router = built(Router, V3).bfloat16()
    router.bias.fill_(2.0)
    router.bias += 0.001
    assert router.bias[0].item() == pytest.approx(2.001)


def test_load_counts_each_tokens_choices():
    experts = torch.tensor([[[0, 2], [2, 3]], [[2, 0], [1, 2]]])
    assert expert_load(experts, 5).tolist() == [2, 1, 4, 1, 0]


def test_load_sums_to_tokens_times_choices():
    layer = built(MoE, V3)
    _, routing = layer(torch.randn(4, 9, DIM))
    assert expert_load(routing.experts, 8).sum() == 4 * 9 * 3


def test_a_layer_is_its_shared_experts_and_the_weighted_sum_of_the_chosen():
    layer = built(MoE, replace(V3, n_shared_experts=2))
    x = torch.randn(2, 7, DIM)
    out, _ = layer(x)

    def swiglu(x, gate, up, down):
        return torch.nn.functional.silu(x @ gate.T) * (x @ up.T) @ down.T

    shared = layer.shared_experts
    assert shared.w1.weight.shape == (10, DIM)
    expected = swiglu(x, shared.w1.weight, shared.w3.weight, shared.w2.weight)
    weights, experts, _ = layer.gate(x.flatten(0, 1))
    for token in range(14):
        sequence, position = divmod(token, 7)
        here = x[sequence, position]
        for weight, e in zip(weights[token], experts[token], strict=True):
            gate, up = layer.experts.w13[e].chunk(2)
            expert = swiglu(here, gate, up, layer.experts.w2[e])
            expected[sequence, position] += weight * expert
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_without_shared_experts_there_is_no_shared_network():
    assert built(MoE, replace(V3, n_shared_experts=0)).shared_experts is None


def slow_balance(affinity, k):
    """Return equations 17 to 20 of DeepSeek-V3 for one sequence, before alpha."""
    n_tokens, n_experts = len(affinity), len(affinity[0])
    f, p = [0.0] * n_experts, [0.0] * n_experts
    for s in affinity:
        top = sorted(range(n_experts), key=lambda i, s=s: s[i], reverse=True)[:k]
        for i in range(n_experts):
            f[i] += (i in top) * n_experts / (k * n_tokens)
            p[i] += s[i] / sum(s) / n_tokens
    return sum(a * b for a, b in zip(f, p, strict=True))


@settings(max_examples=25)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 8)),
    data=st.data(),
    seed=st.integers(0, 2**31),
)
def test_balance_loss_is_equations_17_to_20_of_each_sequence(shape, data, seed):
    k = data.draw(st.integers(1, shape[-1]))
    affinity = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    expected = sum(slow_balance(sequence, k) for sequence in affinity.tolist())
    assert balance_loss(affinity, k).item() == pytest.approx(expected, rel=1e-4)


def test_balance_loss_is_1_per_sequence_at_perfect_balance():
    # Token t prefers experts t and t + 1, so that each is chosen equally often.
    affinity = torch.full((8, 8), 0.2)
    for token in range(8):
        affinity[token, token] = affinity[token, (token + 1) % 8] = 0.9
    loss = balance_loss(affinity.expand(3, 8, 8), 2)
    assert loss.item() == pytest.approx(3)


def test_balance_loss_is_n_over_k_when_all_tokens_agree_entirely():
    affinity = torch.zeros(1, 6, 8)
    affinity[..., :2] = 1.0
    assert balance_loss(affinity, 2).item() == pytest.approx(8 / 2)


def test_balance_loss_pulls_down_the_affinity_of_the_overloaded():
    affinity = torch.tensor([[[0.9, 0.3, 0.2], [0.8, 0.2, 0.3], [0.7, 0.1, 0.1]]])
    affinity.requires_grad_()
    balance_loss(affinity, 1).backward()
    assert (affinity.grad[..., 0] > 0).all()
    assert (affinity.grad[..., 1:] < 0).all()


def test_balance_loss_ignores_bias_and_groups():
    layer = built(MoE, V3)
    x = torch.randn(2, 9, DIM)
    _, before = layer(x)
    layer.gate.bias.uniform_(-5, 5)
    _, after = layer(x)
    assert not torch.equal(before.experts, after.experts)
    assert torch.equal(
        balance_loss(before.affinity, 3), balance_loss(after.affinity, 3)
    )
