"""Pipelines on two and four ranks against one process: three steps of training."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from labkit.config import Layout, MTPConfig
from labkit.memory import apply_recompute
from labkit.parallel.launch import launch
from labkit.parallel.mesh import Mesh
from labkit.parallel.model import Parallel, parallelize
from tests.distributed import serial

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Run:
    """A model, and how it is cut and trained."""

    schedule: str
    case: serial.Case
    pp: int = 2
    vpp: int = 1
    n_micro_batches: int = 4
    rest: dict[str, int] = field(default_factory=dict)
    """Of the layout."""
    cut: dict[str, object] = field(default_factory=dict)
    """For `parallelize`."""
    recompute: str = "none"
    is_in_turns: bool = False
    """Whether overlapped pairs run one after the other."""
    is_repeated: bool = False
    """Whether more steps follow that nothing clears gradients between."""


def drawn(seed: int, n_layers: int = 5) -> serial.Case:
    return serial.drawn(seed, n_layers=n_layers)


def with_mtp(case: serial.Case, depth: int | None) -> serial.Case:
    mtp = None if depth is None else MTPConfig(depth=depth)
    return replace(case, cfg=replace(case.cfg, mtp=mtp))


def with_dense_layers(case: serial.Case, n: int) -> serial.Case:
    return replace(case, cfg=replace(case.cfg, n_dense_layers=n))


def on_two() -> dict[str, Run]:
    return {
        "gpipe": Run("gpipe", drawn(1, 3), n_micro_batches=2),
        "gpipe, two stages a rank": Run("gpipe", drawn(2), vpp=2),
        "1f1b": Run("1f1b", drawn(3, 3), is_repeated=True),
        "1f1b, two stages a rank": Run("1f1b", drawn(4), vpp=2),
        "zero-bubble": Run("zero-bubble", drawn(5, 3)),
        "zero-bubble, two stages a rank": Run("zero-bubble", drawn(6), vpp=2),
        "zbv": Run("zbv", drawn(7), vpp=2, is_repeated=True),
        "dualpipev": Run("dualpipev", drawn(8), vpp=2),
        "dualpipev in turns": Run("dualpipev", drawn(8), vpp=2, is_in_turns=True),
        "one sequence a micro-batch": Run("1f1b", drawn(9, 3), n_micro_batches=8),
        "no experts": Run("zbv", serial.dense(drawn(10)), vpp=2),
        "no MTP": Run("zero-bubble", with_mtp(drawn(11), None), vpp=2),
        "two modules of MTP": Run("dualpipev", with_mtp(drawn(12), 2), vpp=2),
        "a stage of dense layers": Run("1f1b", with_dense_layers(drawn(13), 3)),
        "a stage of the head": Run(
            "1f1b", drawn(14, 3), cut={"layers_per_stage": [3, 0]}
        ),
        "stages without layers": Run(
            "zbv", drawn(15, 3), vpp=2, cut={"layers_per_stage": [0, 2, 0, 1]}
        ),
        "recomputed blocks": Run("zbv", drawn(16), vpp=2, recompute="full"),
        "recomputed parts": Run("dualpipev", drawn(17), vpp=2, recompute="selective"),
    }


def on_four() -> dict[str, Run]:
    return {
        "1f1b": Run("1f1b", drawn(21), pp=4),
        "zero-bubble, two stages a rank": Run("zero-bubble", drawn(23, 8), pp=4, vpp=2),
        "zbv": Run("zbv", drawn(24, 8), pp=4, vpp=2),
        "dualpipev": Run("dualpipev", drawn(25, 8), pp=4, vpp=2, n_micro_batches=8),
        "overlapped experts on other ranks": Run(
            "dualpipev", drawn(26), vpp=2, rest={"dp": 2, "ep": 2}
        ),
        "overlapped shards": Run(
            "dualpipev", drawn(27), vpp=2, rest={"dp": 2}, cut={"zero": 1}
        ),
        "a borrowed embedding, cut by words": Run(
            "zbv", drawn(28), vpp=2, rest={"tp": 2}
        ),
    }


@dataclass
class Seen:
    """What a rank saw of one run."""

    compared: serial.Comparison
    evaluated: float
    """Largest error of a part of the loss, forward passes alone."""
    is_added: bool | None
    """Whether a second step without `zero_grad` doubles gradients, if there was one."""
    n_embeddings: int


def seen(run: Run) -> Seen:
    mesh = Mesh(Layout(pp=run.pp, vpp=run.vpp, **run.rest))
    model = apply_recompute(run.case.model(), run.recompute)
    trained = parallelize(model, mesh, schedule=run.schedule, **run.cut)
    pipeline = trained.pipeline
    if run.is_in_turns:
        pipeline.overlaps = False
    index, n = mesh.dp.get_local_rank(), mesh.dp.size()
    theirs = serial.serial_steps(run.case)
    ours = serial.parallel_steps(
        run.case, trained, index=index, n=n, n_micro_batches=run.n_micro_batches
    )
    held = [p for m in pipeline.modules for p in m.named_parameters()]
    return Seen(
        compared=serial.compare(ours, theirs),
        evaluated=evaluated(run.case, trained, index, n),
        is_added=is_added(run, trained, index, n) if run.is_repeated else None,
        n_embeddings=sum(name == "embed.weight" for name, _ in held),
    )


def evaluated(case: serial.Case, run: Parallel, index: int, n: int) -> float:
    """Return the largest relative error of forward passes alone, after training."""
    model = case.model()
    model.load_state_dict(run.full_tensors())
    with torch.no_grad():
        theirs = model.loss(*case.batch(0))
    ours = run.evaluate(*case.share(0, index, n), n_micro_batches=2)
    return max(
        abs(getattr(ours, part) - getattr(theirs, part)).item()
        / max(abs(getattr(theirs, part)).item(), 1e-3)
        for part in serial.PARTS
    )


def is_added(run: Run, trained: Parallel, index: int, n: int) -> bool:
    """Return whether another step adds its gradients to those that are there."""
    counts = run.case.counts(0) | {"n_micro_batches": run.n_micro_batches}
    trained.step(*run.case.share(0, index, n), **counts)
    once = {name: g.clone() for name, g in trained.full_gradients().items()}
    trained.evaluate(*run.case.share(0, index, n))
    trained.step(*run.case.share(0, index, n), **counts)
    worst, _ = serial.worst(
        trained.full_gradients(), {name: 2 * g for name, g in once.items()}
    )
    return worst < TOLERANCE


def seen_of(runs: Callable[[], dict[str, Run]]) -> dict[str, Seen]:
    return {name: seen(run) for name, run in runs().items()}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Seen]]:
    return launch(seen_of, 2, on_two, timeout=900.0)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Seen]]:
    return launch(seen_of, 4, on_four, timeout=900.0)


def require_equal(of_ranks: list[Seen]) -> None:
    for each in of_ranks:
        compared = each.compared
        assert compared.loss < TOLERANCE
        assert compared.norm < TOLERANCE
        assert compared.gradient < TOLERANCE, compared.where_gradient
        assert compared.parameter < TOLERANCE, compared.where_parameter
        assert compared.n_loads_apart == 0
        assert each.evaluated < TOLERANCE


@pytest.mark.parametrize("name", on_two())
def test_two_ranks_train_as_one_process(two, name):
    require_equal([of_rank[name] for of_rank in two])


@pytest.mark.parametrize("name", on_four())
def test_four_ranks_train_as_one_process(four, name):
    require_equal([of_rank[name] for of_rank in four])


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_step_adds_to_gradients_that_are_there(two, name):
    assert all(of_rank[name].is_added for of_rank in two)


def test_overlapped_pairs_train_to_the_bit_as_pairs_in_turns(two):
    for of_rank in two:
        assert of_rank["dualpipev"] == of_rank["dualpipev in turns"]


def test_the_embedding_is_held_once_where_the_pipeline_ends_where_it_begins(two):
    def held(name: str) -> list[int]:
        return [of_rank[name].n_embeddings for of_rank in two]

    assert held("zbv") == held("dualpipev") == [1, 0]
    assert held("1f1b") == held("zero-bubble, two stages a rank") == [1, 1]
    assert held("no MTP") == [1, 0]


def beyond(tokens: torch.Tensor) -> torch.Tensor:
    return tokens + 1000


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "schedule='1f1b' needs at least 2 micro-batches to fill pp=2 ranks; got "
    "n_micro_batches=1. Set n_micro_batches=2 or lower pp.": {"n_micro_batches": 1},
    "schedule='dualpipev' needs at least 4 micro-batches to fill pp=2 ranks; got "
    "n_micro_batches=2. Set n_micro_batches=4 or lower pp.": {
        "schedule": "dualpipev",
        "vpp": 2,
        "n_micro_batches": 2,
    },
    "schedule='zero-bubble' with vpp=2 takes micro-batches in 2 equal rounds of at "
    "least pp=2; got n_micro_batches=5. Set n_micro_batches=4 or 6.": {
        "schedule": "zero-bubble",
        "vpp": 2,
        "n_micro_batches": 5,
    },
    "schedule='zbv' needs vpp=2; got vpp=1. Set vpp=2 or leave it out.": {
        "schedule": "zbv"
    },
    "schedule must be one of 'gpipe', '1f1b', 'zero-bubble', 'zbv', 'dualpipev'; got "
    "'dualpipe'. Set schedule='gpipe' or another of these.": {"schedule": "dualpipe"},
    "a pipeline needs a layer for each of its pp * vpp stages; got 5 layers for 6 "
    "stages. Lower pp or vpp, or name layers_per_stage, where 0 is allowed.": {
        "vpp": 3
    },
    "sequences must divide into equal micro-batches, because the messages between "
    "stages have one size; got 8 sequences for n_micro_batches=3. Drop 2 of them, or "
    "change n_micro_batches.": {"n_micro_batches": 3},
    "n_tokens must be a whole number of at least 1; got 0. Set n_tokens to 1 or "
    "more.": {"n_tokens": 0},
    "tokens must lie between 0 and 66, padding too; got 1066. Encode the text for this "
    "model's vocabulary of 67.": {"change": beyond},
}
"""Sentences, and what each rank asked for."""


def refused() -> list[str]:
    """Return the sentences with which this rank refuses what it is asked for."""
    return [refusal(**asked) for asked in REFUSED.values()]


def refusal(
    *,
    schedule: str = "1f1b",
    vpp: int = 1,
    change: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    **terms: int,
) -> str:
    case = drawn(31)
    tokens, targets = case.batch(0)
    terms = case.counts(0) | {"n_micro_batches": 4} | terms
    try:
        mesh = Mesh(Layout(pp=2, vpp=vpp))
        run = parallelize(case.model(), mesh, schedule=schedule)
        run.step(change(tokens), targets, **terms)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_every_rank_refuses_what_cannot_run_before_anything_is_sent():
    for of_rank in launch(refused, 2, timeout=600.0):
        assert of_rank == list(REFUSED)
