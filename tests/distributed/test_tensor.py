"""Models cut over two and four tensor-parallel ranks against one process."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from labkit.config import GQAConfig, Layout, MTPConfig
from labkit.memory import apply_recompute
from labkit.model.transformer import cross_entropy_sum
from labkit.parallel.launch import launch
from labkit.parallel.mesh import Mesh
from labkit.parallel.tensor import apply_tensor_parallel, require_cuts
from labkit.parallel.tensor_stream import Stream
from labkit.parallel.vocabulary import cut_cross_entropy_sum
from labkit.precision import convert
from tests.distributed import serial

LOW_RANK, DIRECT = 9, None


def mla(rank: int | None) -> serial.Case:
    """Return a drawn case with queries of this rank: MoE, MTP, an odd vocabulary."""
    case = serial.drawn(1)
    attention = replace(case.cfg.attention, q_lora_rank=rank)
    return replace(case, cfg=replace(case.cfg, attention=attention))


def moe(**changed: object) -> serial.Case:
    case = serial.drawn(2)
    return replace(case, cfg=replace(case.cfg, moe=replace(case.cfg.moe, **changed)))


def dense(**changed: object) -> serial.Case:
    """Return a case of MHA without experts, whose hidden units are odd."""
    case = serial.dense(serial.drawn(3))
    attention = GQAConfig(n_heads=4, n_kv_heads=4, head_dim=6)
    cfg = replace(case.cfg, attention=attention, inter_dim=29, **changed)
    return replace(case, cfg=cfg)


CASES = {
    "queries of low rank": mla(LOW_RANK),
    "direct queries": mla(DIRECT),
    "even sequences": replace(mla(LOW_RANK), seq_len=12),
    "sequences shorter than their shares": replace(mla(DIRECT), seq_len=5),
    "softmax router, groups, no shared expert": moe(
        score_func="softmax",
        n_shared_experts=0,
        n_expert_groups=3,
        n_limited_groups=2,
        has_bias=False,
    ),
    "shared experts of odd width": moe(n_shared_experts=3, moe_inter_dim=5),
    "no balance loss": moe(balance_loss_weight=0.0),
    "MHA, odd hidden units": dense(mtp=MTPConfig(depth=2)),
}

GROUPED = "GQA"
"""Has two KV heads, which four ranks cannot share."""

RUNS = [(name, "shared") for name in (*CASES, GROUPED)] + [
    *(
        (name, "whole")
        for name in ("queries of low rank", "no balance loss", "MHA, odd hidden units")
    ),
    *((name, "recomputed") for name in ("queries of low rank", "direct queries")),
]
"""What is compared, and whether ranks share out positions or hold all; or share them
out in a model that keeps little for its backward pass."""


def has_experts(name: str) -> bool:
    return name != GROUPED and CASES[name].cfg.moe is not None


@dataclass
class Seen:
    """How far a rank's model is from the serial one."""

    losses: dict[str, float]
    gradient: tuple[float, str]
    parameter: tuple[float, str]
    logits: float
    is_load_equal: bool
    biases: list[list[float]]
    n_partial: int


def sum_experts(model: nn.Module, mesh: Mesh) -> None:
    """Add up gradients of experts, to which all these ranks are data-parallel."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            dist.all_reduce(parameter.grad, group=mesh.edp.get_group())


def seen(case: serial.Case, mesh: Mesh, way: str) -> Seen:
    tokens, targets = case.batch(0)
    ours, theirs = case.model(), case.model()
    if way == "recomputed":
        apply_recompute(ours, "selective")
    apply_tensor_parallel(ours, mesh, sequence_parallel=way != "whole")
    parts = []
    for model in (ours, theirs):
        parts.append(model.loss(tokens, targets))
        parts[-1].total.backward()
        model.update_router_bias(parts[-1].load, 0.01)
    sum_experts(ours, mesh)
    with torch.no_grad():
        logits = serial.error(ours(tokens), theirs(tokens))
    whole = {name: serial.whole(p) for name, p in ours.named_parameters()}
    gradients = [p.grad for p in ours.parameters()]
    return Seen(
        losses={
            name: abs(getattr(parts[0], name) - getattr(parts[1], name)).item()
            / max(abs(getattr(parts[1], name).item()), 1e-3)
            for name in serial.PARTS
        },
        gradient=serial.worst(serial.gradients_of(ours), serial.gradients_of(theirs)),
        parameter=serial.worst(whole, dict(theirs.named_parameters())),
        logits=logits,
        is_load_equal=torch.equal(parts[0].load, parts[1].load),
        biases=[bias.tolist() for bias in ours.buffers()],
        n_partial=sum(
            isinstance(g, DTensor) and any(p.is_partial() for p in g.placements)
            for g in gradients
        ),
    )


def rounded(case: serial.Case, mesh: Mesh, *, is_fp8: bool = False) -> dict[str, float]:
    """Return how far rounding takes whole gradients from each other, and from FP32's.

    Products are in BF16 or, where DeepSeek-V3 has it, in FP8.
    """
    gradients, losses = {}, {}
    for name in ("ours", "serial", "fp32"):
        model = case.model()
        if is_fp8 and name != "fp32":
            convert(model)
        if name == "ours":
            apply_tensor_parallel(model, mesh)
        with torch.autocast("cpu", torch.bfloat16, enabled=name != "fp32"):
            loss = model.loss(*case.batch(0)).total
        loss.backward()
        if name == "ours":
            sum_experts(model, mesh)
        parts = sorted(serial.gradients_of(model).items())
        gradients[name] = torch.cat([gradient.flatten() for _, gradient in parts])
        losses[name] = loss.item()
    return {
        "loss": abs(losses["ours"] - losses["serial"]) / losses["serial"],
        "gradient": serial.distance(gradients["ours"], gradients["serial"]),
        "our rounding": serial.distance(gradients["ours"], gradients["fp32"]),
        "serial rounding": serial.distance(gradients["serial"], gradients["fp32"]),
    }


def cut_loss(mesh: Mesh) -> dict[str, float]:
    """Return errors of the loss alone, of logits that FP32's exponential overflows."""
    draw = torch.Generator().manual_seed(0)
    stream, n_words = Stream(mesh.tp, is_shared=True), 13
    logits = 200 * torch.randn(2, 5, n_words, generator=draw)
    targets = torch.randint(n_words, (2, 5), generator=draw)
    targets[0, 1:3] = serial.IGNORED
    whole = logits.clone().requires_grad_()
    theirs = cross_entropy_sum(whole, targets)
    theirs.backward()
    own = slice(stream.cut(n_words)[0], sum(stream.cut(n_words)))
    part = logits[..., own].clone().requires_grad_()
    ours = cut_cross_entropy_sum(part, targets, stream, n_words)
    ours.backward()
    nothing = torch.full_like(targets, serial.IGNORED)
    return {
        "loss": abs(ours - theirs).item() / theirs.item(),
        "gradient": (part.grad - whole.grad[..., own]).abs().max().item(),
        "of nothing": cut_cross_entropy_sum(part, nothing, stream, n_words).item(),
    }


def refusals(mesh: Mesh) -> dict[str, str]:
    """Return the sentences that wrong calls of a cut model end with."""
    case = CASES["direct queries"]
    model = case.model()
    apply_tensor_parallel(model, mesh)
    tokens, targets = case.batch(0)
    outside = torch.full_like(tokens, case.cfg.vocab_size)
    calls = {
        "token": lambda: model.loss(outside, targets),
        "target": lambda: model.loss(tokens, outside),
        "cache": lambda: model.layers[0].attn(
            torch.zeros(1, 1, case.cfg.dim), model.turns(torch.arange(2)), object()
        ),
        "short": lambda: model.loss(tokens[:, :1], targets[:, :1]),
    }
    sentences = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            sentences[name] = str(error)
    return sentences


def sharded() -> tuple[float, str]:
    """Return the worst gradient of 2 x 2 ranks: words and hidden units cut twice."""
    mesh = Mesh(Layout(dp=2, tp=2))
    case = CASES["MHA, odd hidden units"]
    ours, theirs = case.model(), case.model()
    apply_tensor_parallel(ours, mesh)
    blocks = [*ours.layers, *(module.block for module in ours.mtp)]
    for module in (*blocks, ours):
        fully_shard(module, mesh=mesh.dp)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(ours, "loss")
    share = case.share(0, mesh.dp.get_local_rank(), 2)
    ours.loss(*share, **case.counts(0)).total.backward()
    theirs.loss(*case.batch(0)).total.backward()
    return serial.worst(serial.gradients_of(ours), serial.gradients_of(theirs))


def work() -> dict[str, object]:
    n_ranks = dist.get_world_size()
    mesh = Mesh(Layout(tp=n_ranks))
    cases = CASES | {GROUPED: serial.dense(serial.drawn(1))}
    results = {
        (name, way): seen(cases[name], mesh, way)
        for name, way in RUNS
        if name != GROUPED or n_ranks == 2
    }
    narrow = serial.for_bf16(CASES["direct queries"])
    results["bf16"] = rounded(narrow, mesh)
    results["fp8"] = rounded(narrow, mesh, is_fp8=True)
    results["loss"], results["refusals"] = cut_loss(mesh), refusals(mesh)
    if n_ranks == 4:
        results["sharded"] = sharded()
    return results


@pytest.fixture(scope="module")
def two() -> list[dict]:
    return launch(work, 2, timeout=400)


@pytest.fixture(scope="module")
def four() -> list[dict]:
    return launch(work, 4, timeout=600)


@pytest.fixture(params=["two", "four"])
def ranks(request) -> list[dict]:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_losses_and_every_gradient_are_those_of_one_process(ranks, name, way):
    for rank in ranks:
        if name == GROUPED and len(ranks) == 4:
            assert (name, way) not in rank  # refused, see below
            continue
        result = rank[name, way]
        assert max(result.losses.values()) < 1e-5, result.losses
        assert result.gradient[0] < 1e-5, result.gradient
        assert result.parameter[0] == 0, result.parameter
        assert result.logits < 1e-5
        assert result.n_partial == 0  # complete, not parts of a sum


@pytest.mark.parametrize(("name", "way"), [run for run in RUNS if has_experts(run[0])])
def test_every_rank_sees_the_load_of_whole_sequences_so_biases_agree(ranks, name, way):
    results = [rank[name, way] for rank in ranks]
    assert all(result.is_load_equal for result in results)
    assert all(result.biases == results[0].biases for result in results)


def test_in_bf16_gradients_differ_by_its_rounding(ranks):
    for rank in ranks:
        errors = rank["bf16"]
        assert errors["loss"] < 1e-3, errors
        assert errors["gradient"] < 1e-2, errors
        assert errors["our rounding"] < 1.25 * errors["serial rounding"], errors


def test_fp8_rounds_a_cut_model_no_more_than_a_whole_one(ranks):
    for rank in ranks:
        errors = rank["fp8"]
        assert errors["serial rounding"] > 0.05  # FP8 is on
        assert errors["our rounding"] < 1.25 * errors["serial rounding"], errors


def test_the_loss_of_cut_logits_is_exact_where_exponentials_overflow(ranks):
    for rank in ranks:
        assert rank["loss"]["loss"] < 1e-6
        assert rank["loss"]["gradient"] < 1e-6
        assert rank["loss"]["of nothing"] == 0


def test_fsdp_cuts_again_what_tensor_parallelism_has_cut(four):
    for rank in four:
        assert rank["sharded"][0] < 1e-5, rank["sharded"]


def test_wrong_calls_of_a_cut_model_end_with_a_sentence(ranks):
    for rank in ranks:
        refused = rank["refusals"]
        assert refused["token"].startswith("tokens must lie between 0 and ")
        assert refused["target"].startswith("targets must lie between 0 and ")
        assert refused["short"].startswith("sequences must be longer than the depth")
        assert refused["cache"] == (
            "a model cut by tensor parallelism keeps no cache; got one. Generate with "
            "the whole model."
        )


@pytest.mark.parametrize(
    ("cfg", "tp", "sentence"),
    [
        (
            dense().cfg,
            3,
            "tp must divide n_heads, because each rank takes as many whole heads; got "
            "tp=3 and 4. Set tp=1.",
        ),
        (
            serial.dense(serial.drawn(1)).cfg,
            4,
            "tp must divide n_kv_heads, because each rank takes as many whole heads; "
            "got tp=4 and 2. Set tp=2.",
        ),
        (
            replace(dense().cfg, inter_dim=5),
            4,
            "inter_dim must leave a part for every tensor-parallel rank; got 5 for "
            "tp=4. Set a smaller tp.",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused(cfg, tp, sentence):
    with pytest.raises(ValueError) as refusal:
        require_cuts(cfg, tp)
    assert str(refusal.value) == sentence
