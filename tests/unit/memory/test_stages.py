"""Which layers lie where, and what a rank keeps; PyTorch's own schedules judge it."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from labkit.config import PRESETS, Layout
from labkit.memory.stages import (
    SCHEDULES,
    Chunk,
    in_flight,
    stage_layers,
    virtual_stages,
)

TINY, V3 = PRESETS["tiny"], PRESETS["v3-671b"]


def layers_of(stages):
    return [[list(chunk.layers) for chunk in stage.chunks] for stage in stages]


def test_one_rank_holds_the_whole_model():
    (stage,) = stage_layers(TINY, Layout())

    assert stage.chunks == (Chunk(layers=range(4), is_first=True, is_last=True),)
    assert stage.contents(TINY)._asdict() == {
        "n_dense": 1,
        "n_sparse": 3,
        "n_embeddings": 1,
        "n_output_heads": 1,
        "n_mtp": 1,
        "n_routers": 4,
    }


def test_the_head_and_each_mtp_module_weigh_as_much_as_a_layer():
    six = replace(TINY, n_layers=6)

    assert layers_of(stage_layers(six, Layout(pp=2))) == [[[0, 1, 2, 3]], [[4, 5]]]
    five = replace(TINY, n_layers=5, mtp=None)
    assert layers_of(stage_layers(five, Layout(pp=2))) == [[[0, 1, 2]], [[3, 4]]]


def test_every_stage_has_a_layer_when_there_are_enough():
    assert layers_of(stage_layers(TINY, Layout(pp=4))) == [[[0]], [[1]], [[2]], [[3]]]


def test_layers_can_be_laid_by_hand_and_a_stage_left_without():
    stages = stage_layers(TINY, Layout(pp=3), layers_per_stage=(1, 3, 0))

    assert layers_of(stages) == [[[0]], [[1, 2, 3]], [[]]]
    assert stages[2].contents(TINY).n_output_heads == 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1f1b", [[[0], [2]], [[1], [3]]]),
        ("zero-bubble", [[[0], [2]], [[1], [3]]]),
        ("zbv", [[[0], [3]], [[1], [2]]]),
        ("dualpipev", [[[0], [3]], [[1], [2]]]),
    ],
)
def test_two_chunks_a_rank_go_round_or_back(schedule, expected):
    stages = stage_layers(TINY, Layout(pp=2, vpp=2), schedule=schedule)

    assert layers_of(stages) == expected


def test_dualpipe_keeps_every_stage_on_two_ranks():
    stages = stage_layers(TINY, Layout(pp=4), schedule="dualpipe")

    assert layers_of(stages) == [[[0], [3]], [[1], [2]], [[2], [1]], [[3], [0]]]
    assert {stage.n_copies for stage in stages} == {2}


@given(
    schedule=st.sampled_from(SCHEDULES),
    pp=st.integers(1, 8),
    vpp=st.integers(1, 4),
    n_layers=st.integers(1, 80),
    depth=st.integers(0, 2),
)
def test_every_layer_lies_somewhere_once_and_stages_differ_by_the_ends_alone(
    schedule, pp, vpp, n_layers, depth
):
    pp = 2 * pp if schedule == "dualpipe" else pp
    vpp = {"dualpipe": 1, "zbv": 2, "dualpipev": 2}.get(schedule, vpp)
    cfg = replace(TINY, n_layers=n_layers + pp * vpp)
    cfg = replace(cfg, mtp=replace(TINY.mtp, depth=depth) if depth else None)

    stages = stage_layers(cfg, Layout(pp=pp, vpp=vpp), schedule=schedule)

    n_copies = stages[0].n_copies
    where = Counter(i for row in layers_of(stages) for chunk in row for i in chunk)
    assert where == dict.fromkeys(range(cfg.n_layers), n_copies)
    chunks = [chunk for stage in stages for chunk in stage.chunks]
    for end in ("is_first", "is_last"):
        assert sum(getattr(chunk, end) for chunk in chunks) == n_copies
    sizes = {len(chunk.layers) for chunk in chunks if not chunk.is_last}
    assert not sizes or max(sizes) - min(sizes) <= 1
    contents = [stage.contents(cfg) for stage in stages]
    assert sum(c.n_dense + c.n_sparse for c in contents) == n_copies * cfg.n_layers


def test_mtp_brings_the_embedding_to_the_last_rank_unless_the_first_chunk_is_there():
    last = stage_layers(TINY, Layout(pp=2))[1].contents(TINY)
    assert (last.n_mtp, last.n_embeddings) == (1, 1)

    plain = replace(TINY, mtp=None)
    last = stage_layers(plain, Layout(pp=2))[1].contents(plain)
    assert (last.n_mtp, last.n_embeddings, last.n_output_heads) == (0, 0, 1)

    both, neither = stage_layers(TINY, Layout(pp=2, vpp=2), schedule="dualpipev")
    assert both.contents(TINY).n_embeddings == both.contents(TINY).n_mtp == 1
    assert neither.contents(TINY).n_embeddings == neither.contents(TINY).n_mtp == 0


def test_without_experts_every_layer_is_dense_and_no_router_is_there():
    dense = replace(TINY, moe=None, n_dense_layers=0)
    contents = stage_layers(dense, Layout())[0].contents(dense)

    assert (contents.n_dense, contents.n_sparse, contents.n_routers) == (4, 0, 0)


def single_actions(order):
    """Yield the actions of a rank, overlapped pairs taken apart."""
    for action in order:
        if action is not None and action.sub_actions:
            yield from action.sub_actions
        elif action is not None:
            yield action


def kept_in_torch(order):
    """Return micro-batches by stage at the instant at which most are kept in all."""
    live, fullest = set(), set()
    for action in single_actions(order):
        pair = (action.stage_index, action.microbatch_index)
        match action.computation_type.name:
            case "FORWARD":
                live.add(pair)
            case "FULL_BACKWARD" | "BACKWARD_WEIGHT":
                live.discard(pair)
        if len(live) > len(fullest):
            fullest = set(live)
    return Counter(stage for stage, _ in fullest)


@pytest.mark.parametrize("pp", [2, 4, 5])
@pytest.mark.parametrize("rounds", [2, 3, 5])
@pytest.mark.parametrize(
    ("schedule", "vpp", "in_torch"),
    [
        ("gpipe", 1, "GPipe"),
        ("gpipe", 2, "LoopedBFS"),
        ("1f1b", 1, "1F1B"),
        ("1f1b", 2, "Interleaved1F1B"),
        ("1f1b", 3, "Interleaved1F1B"),
        ("zero-bubble", 2, "InterleavedZeroBubble"),
        ("zero-bubble", 3, "InterleavedZeroBubble"),
        ("zbv", 2, "ZBVZeroBubble"),
        ("dualpipev", 2, "DualPipeV"),
    ],
)
def test_a_rank_keeps_what_it_keeps_in_the_schedule_of_torch(
    schedule, vpp, in_torch, pp, rounds
):
    layout, n = Layout(pp=pp, vpp=vpp), pp * rounds
    orders = get_schedule_ops(in_torch, pp, n, num_stages_per_rank=vpp)
    # PyTorch lists the last rank of its 1F1B a micro-batch late, and runs it right.
    n_ranks = pp - 1 if in_torch == "1F1B" else pp
    for rank in range(n_ranks):
        expected = kept_in_torch(orders[rank])
        stages = virtual_stages(layout, rank, schedule)
        assert in_flight(layout, rank, n, schedule=schedule) == tuple(
            expected[stage] for stage in stages
        )


@pytest.mark.parametrize("n", [3, 10, 15])
def test_interleaving_takes_groups_that_are_no_multiple_of_the_ranks(n):
    layout = Layout(pp=4, vpp=2)
    orders = get_schedule_ops("Interleaved1F1B", 4, n, num_stages_per_rank=2)
    for rank in range(4):
        kept = kept_in_torch(orders[rank])
        assert in_flight(layout, rank, n) == (kept[rank], kept[rank + 4])


@pytest.mark.parametrize(
    ("schedule", "vpp", "stages_kept"),
    [("1f1b", 1, 8), ("zero-bubble", 1, 8), ("dualpipe", 1, 9)],
)
def test_the_first_rank_keeps_what_the_v3_report_states(schedule, vpp, stages_kept):
    layout = Layout(pp=8, vpp=vpp)

    assert sum(in_flight(layout, 0, 40, schedule=schedule)) == stages_kept


def test_dualpipev_on_half_the_ranks_keeps_as_many_as_dualpipe():
    whole = [sum(in_flight(Layout(pp=8), r, 40, schedule="dualpipe")) for r in range(8)]
    layout = Layout(pp=4, vpp=2)
    half = [sum(in_flight(layout, r, 40, schedule="dualpipev")) for r in range(4)]

    assert set(whole) == set(half) == {9}


@pytest.mark.parametrize(
    ("rank", "alone", "pairs"), [(0, 6, 1), (1, 4, 2), (2, 2, 3), (3, 0, 4)]
)
def test_dualpipe_fills_up_in_the_phases_of_its_authors(rank, alone, pairs):
    # Of 8 ranks: forwards from the near end alone, then from both ends in turn; each
    # backward that follows makes room for a forward, until one more from the near end.
    near, far = alone + pairs + 1, pairs

    layout = Layout(pp=8)
    assert in_flight(layout, rank, 40, schedule="dualpipe") == (near, far)
    assert in_flight(layout, 7 - rank, 40, schedule="dualpipe") == (far, near)


def test_the_last_rank_of_1f1b_keeps_a_single_micro_batch():
    assert [in_flight(Layout(pp=4), rank, 9) for rank in range(4)] == [
        (4,),
        (3,),
        (2,),
        (1,),
    ]


@pytest.mark.parametrize(("pp", "vpp"), [(4, 2), (8, 3), (16, 4)])
def test_interleaving_costs_the_first_rank_the_published_factor(pp, vpp):
    chunks = sum(in_flight(Layout(pp=pp, vpp=vpp), 0, 8 * pp))

    assert chunks / (pp * vpp) == 1 + (pp - 1) / (pp * vpp)


@given(
    schedule=st.sampled_from(SCHEDULES),
    half=st.integers(1, 6),
    vpp=st.integers(1, 3),
    n=st.integers(1, 20),
)
def test_no_chunk_keeps_more_than_the_step_has(schedule, half, vpp, n):
    vpp = {"dualpipe": 1, "zbv": 2, "dualpipev": 2}.get(schedule, vpp)
    layout = Layout(pp=2 * half, vpp=vpp)
    for rank in range(layout.pp):
        kept = in_flight(layout, rank, n, schedule=schedule)
        stages = virtual_stages(layout, rank, schedule)
        assert len(kept) == len(stages)
        assert all(0 <= k <= n for k in kept) and sum(kept) >= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: stage_layers(TINY, Layout(pp=2), schedule="ring"),
            "schedule must be one of '1f1b', .*; got 'ring'. Set schedule='1f1b' or",
        ),
        (
            lambda: stage_layers(TINY, Layout(pp=2), schedule="zbv"),
            "schedule='zbv' puts two chunks on each rank and needs vpp=2; got vpp=1",
        ),
        (
            lambda: stage_layers(TINY, Layout(pp=2, vpp=2), schedule="dualpipe"),
            "needs vpp=1; got vpp=2. Set vpp=1, or take schedule='dualpipev'",
        ),
        (
            lambda: in_flight(Layout(pp=3), 0, 8, schedule="dualpipe"),
            "needs an even pp; got pp=3. Set pp=4, or take schedule='dualpipev'",
        ),
        (
            lambda: stage_layers(TINY, Layout(pp=5)),
            "needs a layer for each of its pp \\* vpp virtual stages; got 4 layers "
            "for 5. Lower pp or vpp.",
        ),
        (
            lambda: stage_layers(TINY, Layout(pp=2), layers_per_stage=(3, 2)),
            "must name the layers of each virtual stage, which are pp \\* vpp = 2, and "
            "sum to n_layers=4; got 2 numbers that sum to 5. Correct it, or leave it",
        ),
        (
            lambda: stage_layers(TINY, Layout(pp=2), layers_per_stage=(5, -1)),
            r"layers_per_stage\[1\] must be a whole number of at least 0; got -1",
        ),
        (
            lambda: in_flight(Layout(pp=4), 4, 8),
            "rank must be below pp=4, the ranks of the pipeline; got 4. Set rank=3",
        ),
        (
            lambda: in_flight(Layout(pp=4), 0, 0),
            "n_micro_batches must be a whole number of at least 1; got 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
