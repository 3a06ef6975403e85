"""Models whose experts are spread over two and four ranks against one process."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from labkit.config import GQAConfig, Layout, MTPConfig
from labkit.model import Transformer
from labkit.parallel.data import apply_data_parallel
from labkit.parallel.expert import apply_expert_parallel
from labkit.parallel.launch import launch
from labkit.parallel.mesh import Mesh
from tests.distributed import serial


def moe(seed: int, n_experts: int = 8, **changed: object) -> serial.Case:
    case = serial.drawn(seed, n_experts=n_experts)
    return replace(case, cfg=replace(case.cfg, moe=replace(case.cfg.moe, **changed)))


def other(case: serial.Case, **changed: object) -> serial.Case:
    return replace(case, cfg=replace(case.cfg, **changed))


GQA = GQAConfig(n_heads=4, n_kv_heads=2, head_dim=6)

CASES = {
    "sigmoid router, a dense layer, MTP": moe(0),
    "softmax router, groups, no shared experts": moe(
        1,
        score_func="softmax",
        n_shared_experts=0,
        n_expert_groups=4,
        n_limited_groups=2,
        n_activated_experts=3,
        has_bias=False,
    ),
    "seven experts": moe(2, 7, n_activated_experts=5),
    "GQA, no dense layer, two MTP modules": other(
        moe(3), attention=GQA, n_dense_layers=0, mtp=MTPConfig(depth=2)
    ),
    "all tokens to the last rank": moe(4),
    "no balance loss, weights as they are": moe(
        5, balance_loss_weight=0.0, norm_topk_prob=False
    ),
}

CROWDED = "all tokens to the last rank"

ROUNDED = serial.for_bf16(moe(6, 4))


@dataclass
class Outcome:
    """What one rank saw of one batch."""

    loss: float
    gradient: tuple[float, str]
    load: int
    """(Token, choice) pairs that were counted elsewhere."""

    evaluated: float
    """The loss without gradients."""


def prepared(case: serial.Case, name: str = "") -> Transformer:
    """Return the model, whose routers may have but one answer."""
    model = case.model()
    if name == CROWDED:
        for router in model.routers():
            router.bias[-2:] = 10.0  # two experts, and any affinity is below 1
    return model


def outcome(
    case: serial.Case, name: str, mesh: Mesh, *, zero: int = 0, **options: object
) -> Outcome:
    """Return how far a model on all ranks is from one in this process."""
    alone, spread = prepared(case, name), prepared(case, name)
    theirs = alone.loss(*case.batch(0), **case.counts(0))
    theirs.total.backward()
    apply_expert_parallel(spread, mesh, **options)
    handle = apply_data_parallel(spread, mesh, zero=zero)
    share = case.share(0, mesh.dp.get_local_rank(), mesh.dp.size())
    ours, losses = [], []
    for index, rows in enumerate(zip(*(part.chunk(2) for part in share), strict=True)):
        with handle.micro_batch(is_last=index == 1):
            parts = spread.loss(*rows, **case.counts(0))
            parts.total.backward()
        ours.append(parts)
    handle.finish()
    gradients = serial.gradients_of(spread)
    with torch.no_grad():
        losses.append(spread.loss(*share, **case.counts(0)).total)
    losses.append(sum(parts.total.detach() for parts in ours))
    load = sum(parts.load for parts in ours)
    for each in (*losses, load):
        dist.all_reduce(each)
    expected = {name: p.grad for name, p in alone.named_parameters()}
    off = serial.worst(gradients, expected)
    evaluated, loss = (abs(each.item() / theirs.total.item() - 1) for each in losses)
    return Outcome(loss, off, int((load - theirs.load).abs().sum()) // 2, evaluated)


def distances(mesh: Mesh, payload: str) -> tuple[float, float]:
    """Return how much all gradients, and the loss, are off in this payload."""
    alone, spread = ROUNDED.model(), ROUNDED.model()
    theirs = alone.loss(*ROUNDED.batch(0), **ROUNDED.counts(0))
    theirs.total.backward()
    apply_expert_parallel(spread, mesh, payload=payload)
    handle = apply_data_parallel(spread, mesh)
    share = ROUNDED.share(0, mesh.dp.get_local_rank(), mesh.dp.size())
    total = spread.loss(*share, **ROUNDED.counts(0)).total
    total.backward()
    handle.finish()
    total = total.detach()
    dist.all_reduce(total)
    expected = {name: p.grad for name, p in alone.named_parameters()}
    off, _ = serial.worst(serial.gradients_of(spread), expected, serial.distance)
    return off, abs(total.item() / theirs.total.item() - 1)


def placements(mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """Return what became DTensors, and the shapes of this rank's parts."""
    model = CASES["seven experts"].model()
    apply_expert_parallel(model, mesh)
    return {
        name: tuple(parameter.to_local().shape)
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    }


def refusals(mesh: Mesh) -> tuple[str, str]:
    with pytest.raises(ValueError, match="ep must") as too_few:
        apply_expert_parallel(moe(0, 3).model(), mesh)
    model = moe(0).model()
    apply_expert_parallel(model, mesh)
    with pytest.raises(ValueError, match="experts are spread") as twice:
        apply_expert_parallel(model, mesh)
    return str(too_few.value), str(twice.value)


def difference_of_a_copy(mesh: Mesh) -> float:
    """Return how much more a copy says after its own experts have been emptied."""
    case = CASES["sigmoid router, a dense layer, MTP"]
    model = case.model()
    apply_expert_parallel(model, mesh)
    twin = copy.deepcopy(model)
    share = case.share(0, mesh.dp.get_local_rank(), mesh.dp.size())
    with torch.no_grad():
        for block in (*twin.layers[1:], twin.mtp[0].block):
            block.ffn.experts._parameters["w2"].to_local().zero_()
        losses = [each.loss(*share).total for each in (model, twin)]
    return (losses[0] - losses[1]).abs().item()


def on_two_ranks() -> dict[str, object]:
    mesh = Mesh(Layout(dp=2, ep=2))
    found = {name: outcome(case, name, mesh) for name, case in CASES.items()}
    case = CASES["sigmoid router, a dense layer, MTP"]
    found["one after the other"] = outcome(case, "", mesh, overlap_shared=False)
    found["payloads"] = {
        payload: distances(mesh, payload) for payload in ("fp32", "bf16", "fp8")
    }
    found["placements"] = placements(mesh)
    found["copy"] = difference_of_a_copy(mesh)
    return found


def on_four_ranks() -> dict[str, object]:
    mesh = Mesh(Layout(dp=4, ep=4))
    found = {name: outcome(case, name, mesh) for name, case in CASES.items()}
    for name, case in CASES.items():
        found[f"{name}, two nodes"] = outcome(case, name, mesh, n_nodes=2)
    found["refusals"] = refusals(mesh)
    halves = Mesh(Layout(dp=4, ep=2))
    case = CASES["seven experts"]
    for zero in (0, 3):
        found[f"copies of experts, zero={zero}"] = outcome(case, "", halves, zero=zero)
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, object]]:
    return launch(on_two_ranks, 2, timeout=300)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, object]]:
    return launch(on_four_ranks, 4, timeout=400)


def require_equal(found: list[dict[str, object]], name: str) -> None:
    for seen in found:
        assert seen[name].loss < 1e-6
        assert seen[name].evaluated < 1e-6
        assert seen[name].gradient[0] < 1e-5, seen[name].gradient
        assert seen[name].load == 0


@pytest.mark.parametrize("name", [*CASES, "one after the other"])
def test_on_two_ranks_loss_gradients_and_load_are_those_of_one(two_ranks, name):
    require_equal(two_ranks, name)


@pytest.mark.parametrize("name", CASES)
def test_on_four_ranks_loss_gradients_and_load_are_those_of_one(four_ranks, name):
    require_equal(four_ranks, name)


@pytest.mark.parametrize("name", CASES)
def test_on_two_nodes_loss_gradients_and_load_are_those_of_one(four_ranks, name):
    require_equal(four_ranks, f"{name}, two nodes")


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_with_the_same_experts_sum_their_gradients(four_ranks, zero):
    require_equal(four_ranks, f"copies of experts, zero={zero}")


def test_narrower_payloads_round_and_no_more(two_ranks):
    for seen in two_ranks:
        (exact, _), (bf16, bf16_loss), (fp8, fp8_loss) = seen["payloads"].values()
        assert exact < 1e-5
        assert 1e-4 < bf16 < 1e-2
        assert 3 * bf16 < fp8 < 0.1
        assert bf16_loss < 1e-4
        assert fp8_loss < 1e-3


def test_experts_alone_are_cut_under_their_names_and_the_last_rank_has_fewer(
    two_ranks,
):
    first, last = (seen["placements"] for seen in two_ranks)
    layers = ["layers.1", "layers.2", "mtp.0.block"]
    weights = {f"{layer}.ffn.experts.{w}" for layer in layers for w in ("w13", "w2")}
    assert set(first) == set(last) == weights
    assert {shape[0] for shape in first.values()} == {4}
    assert {shape[0] for shape in last.values()} == {3}


def test_a_copy_of_the_model_uses_its_own_experts(two_ranks):
    for seen in two_ranks:
        assert seen["copy"] > 1e-3


def test_what_cannot_be_spread_is_one_sentence(four_ranks):
    assert four_ranks[0]["refusals"] == (
        "ep must leave an expert for each rank, of which all but the last take 1; got "
        "ep=4 and 3 experts. Set ep=1.",
        "experts are spread once, before data parallelism; got a model whose experts "
        "are spread or cut already. Build it anew.",
    )
