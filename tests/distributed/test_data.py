"""Data parallelism on two and four processes against one: equal, and who keeps what."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from labkit.config import Layout
from labkit.parallel.data import apply_data_parallel
from labkit.parallel.held import Held, held
from labkit.parallel.launch import launch
from labkit.parallel.mesh import Mesh
from labkit.parallel.model import parallelize
from labkit.training.optimizer import build_optimizer
from tests.distributed import serial
from tests.distributed.trials import Outcome, check, outcomes, trial

BF16 = torch.bfloat16

TWO = {
    "zero 0": trial(0, {"dp": 2}, zero=0),
    "zero 1": trial(1, {"dp": 2}, zero=1),
    "zero 2": trial(2, {"dp": 2}, zero=2),
    "zero 3": trial(3, {"dp": 2}, zero=3),
    "zero 0, two micro-batches": trial(4, {"dp": 2}, n=2, zero=0),
    "zero 1, two micro-batches": trial(5, {"dp": 2}, n=2, zero=1),
    "zero 2, uneven micro-batches": trial(6, {"dp": 2}, n=3, zero=2),
    "zero 3, two micro-batches": trial(7, {"dp": 2}, n=2, zero=3),
    "zero 0, BF16": trial(8, {"dp": 2}, n=2, zero=0, mixed=BF16),
    "zero 1, BF16": trial(9, {"dp": 2}, n=2, zero=1, mixed=BF16),
    "zero 2, BF16": trial(10, {"dp": 2}, n=2, zero=2, mixed=BF16),
    "zero 3, BF16": trial(11, {"dp": 2}, n=2, zero=3, mixed=BF16),
}

FOUR = {
    "zero 0": trial(12, {"dp": 4}, n=2, zero=0),
    "zero 3": trial(13, {"dp": 4}, zero=3),
    "two copies, zero 1": trial(14, {"dp": 4}, n=2, replicate=2, zero=1),
    "two copies, zero 2": trial(15, {"dp": 4}, n=2, replicate=2, zero=2),
    "two copies, zero 3": trial(16, {"dp": 4}, n=2, replicate=2, zero=3),
    "four copies": trial(17, {"dp": 4}, replicate=4, zero=1),
    "two copies, BF16": trial(18, {"dp": 4}, replicate=2, zero=3, mixed=BF16),
}
dense = TWO["zero 3"]
TWO["zero 3, dense"] = replace(dense, case=serial.dense(dense.case))


class Kept:
    """What a rank holds at three times of a step of two micro-batches."""

    def __init__(self, zero: int) -> None:
        case, mesh = serial.drawn(0), Mesh(Layout(dp=2))
        model = case.model()
        names = [name for name, _ in model.named_parameters()]
        data = apply_data_parallel(model, mesh, zero=zero)
        assert [name for name, _ in model.named_parameters()] == names
        optimizer = build_optimizer(model, case.train)
        batch = case.share(0, mesh.rank, 2)
        at_head: list[Held] = []
        hook = model.head.register_forward_pre_hook(
            lambda *_: at_head.append(held(model))
        )
        for is_last in (False, True):
            with data.micro_batch(is_last=is_last):
                model.loss(*batch, **case.counts(0)).total.backward()
            if not is_last:
                self.between = held(model, optimizer)
                hook.remove()
        optimizer.step()
        self.after = held(model, optimizer)
        self.at_head = at_head[0]
        outside = [model.embed, model.norm, model.head]
        self.in_use = sum(p.numel() for m in outside for p in m.parameters())
        self.is_cut = all(isinstance(p, DTensor) for p in model.parameters())


def evaluated(zero: int) -> tuple[float, float, bool]:
    """Return the loss of forward passes alone, the serial one, and what is left cut."""
    case, mesh = serial.drawn(1), Mesh(Layout(dp=2))
    run = parallelize(case.model(), mesh, zero=zero)
    parts = run.evaluate(*case.share(0, mesh.rank, 2))
    theirs = case.model().loss(*case.batch(0))
    is_cut = all(isinstance(p, DTensor) for p in run.parameters())
    return parts.total.item(), theirs.total.item(), is_cut


def refusals() -> dict[str, str]:
    """Return the sentences that wrong calls end with."""
    case, mesh = serial.drawn(0), Mesh(Layout(dp=2))
    copies = Mesh(Layout(dp=2), replicate=2)
    run = parallelize(case.model(), mesh)
    calls = {
        "level": lambda: apply_data_parallel(case.model(), mesh, zero=4),
        "copies": lambda: apply_data_parallel(case.model(), copies, zero=0),
        "world": lambda: Mesh(Layout(dp=3)),
        "context": lambda: Mesh(Layout(cp=2)),
        "replicas": lambda: Mesh(Layout(dp=2), replicate=3),
        "experts": lambda: Mesh(Layout(dp=2, ep=2), replicate=2),
        "micro-batches": lambda: run.step(
            *case.share(0, 0, 2), **case.counts(0), n_micro_batches=5
        ),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as refusal:
            call()
        said[name] = str(refusal.value)
    return said


def on_two() -> dict[str, object]:
    return {
        "outcomes": outcomes(TWO),
        "kept": [vars(Kept(zero)) for zero in range(4)],
        "evaluated": [evaluated(zero) for zero in (0, 2, 3)],
        "refusals": refusals(),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, object]]:
    return launch(on_two, 2, timeout=600)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Outcome]]:
    return launch(outcomes, 4, FOUR, timeout=600)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_one_process(two, name):
    check([rank["outcomes"] for rank in two], name, rounded=1e-2)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one_process(four, name):
    check(four, name, rounded=1e-2)


def kept(two: list[dict[str, object]], zero: int, time: str, what: str) -> list[int]:
    """Return the bytes of each rank."""
    return [getattr(rank["kept"][zero][time], what) for rank in two]


def whole_bytes() -> int:
    return 4 * sum(p.numel() for p in serial.drawn(0).model().parameters())


@pytest.mark.parametrize(
    ("zero", "is_whole"), list(enumerate([True, True, True, False]))
)
def test_weights_between_micro_batches_are_whole_below_zero_3(two, zero, is_whole):
    ranks = kept(two, zero, "between", "weights")
    assert sum(ranks) == whole_bytes() * (2 if is_whole else 1)


@pytest.mark.parametrize(
    ("zero", "is_whole"), list(enumerate([True, True, False, False]))
)
def test_gradients_between_micro_batches_are_whole_below_zero_2(two, zero, is_whole):
    ranks = kept(two, zero, "between", "gradients")
    assert sum(ranks) == whole_bytes() * (2 if is_whole else 1)


@pytest.mark.parametrize(
    ("zero", "is_whole"), list(enumerate([True, False, False, False]))
)
def test_moments_are_whole_below_zero_1(two, zero, is_whole):
    ranks = kept(two, zero, "after", "moments")
    assert sum(ranks) == 2 * whole_bytes() * (2 if is_whole else 1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_each_rank_keeps_about_half_after_the_step(two, zero):
    assert all(rank["kept"][zero]["is_cut"] for rank in two)
    for what in ("weights", "gradients"):
        ranks = kept(two, zero, "after", what)
        assert sum(ranks) == whole_bytes()
        assert max(ranks) < 0.55 * whole_bytes()


def test_with_zero_3_blocks_are_cut_while_the_head_computes(two):
    whole, ranks = whole_bytes(), kept(two, 3, "at_head", "weights")
    # Embedding, head and norms outside of blocks are whole; of the rest, half.
    assert sum(ranks) >= whole + 4 * two[0]["kept"][3]["in_use"]
    assert max(ranks) < 0.6 * whole
    # Below, the blocks that have computed still are: all but that of MTP.
    assert min(kept(two, 2, "at_head", "weights")) > 0.8 * whole


def test_evaluation_gives_the_serial_loss_and_leaves_weights_cut(two):
    for rank in two:
        for (ours, theirs, is_cut), zero in zip(
            rank["evaluated"], (0, 2, 3), strict=True
        ):
            assert ours == pytest.approx(theirs, rel=1e-6)
            assert is_cut == (zero > 0)


def test_a_mesh_without_processes_is_refused():
    with pytest.raises(ValueError) as refusal:
        Mesh(Layout())
    assert str(refusal.value) == (
        "a mesh joins processes, and this one is in no group. Make it in a function "
        "that labkit.parallel.launch runs."
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("level", "zero must be 0, 1, 2 or 3; got 4. Set zero=3 or less."),
        (
            "copies",
            "replicate must be 1 with zero=0, because copies of shards need shards; "
            "got replicate=2. Set zero=1 or more.",
        ),
        (
            "world",
            "pp * dp * cp * tp must equal the number of ranks: 1 * 3 * 1 * 1 = 3, but "
            "2 ranks are running. With pp=1, cp=1 and tp=1, set dp=2.",
        ),
        (
            "context",
            "cp must be 1, because processes do not share sequences that way here; got "
            "cp=2. Set cp=1, and tp for long sequences.",
        ),
        (
            "replicas",
            "replicate must divide dp, because each copy takes as many ranks; got "
            "replicate=3 and dp=2. Set replicate=1.",
        ),
        (
            "experts",
            "ep must divide dp / replicate * tp, because each copy holds all experts; "
            "got ep=2 and 2 / 2 * 1 = 1. Set replicate=1 or a smaller ep.",
        ),
        (
            "micro-batches",
            "every micro-batch needs a sequence; got n_micro_batches=5 for 4 "
            "sequences. Set n_micro_batches=4 or less.",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(two, name, sentence):
    assert two[0]["refusals"][name] == two[1]["refusals"][name] == sentence
