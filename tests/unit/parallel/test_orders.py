"""Ranks work in the order in which PyTorch runs them, or as DualPipe's authors do."""

import re
from collections import Counter
from dataclasses import dataclass, field

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from labkit.config import Layout
from labkit.memory import stages
from labkit.parallel.pipeline import SCHEDULES, orders, parse, written
from labkit.parallel.pipeline.actions import Action, actions_of
from labkit.parallel.pipeline.orders import V_SHAPED, chunks_per_rank


@dataclass
class RecordingStage:
    """A stage of PyTorch's that computes nothing and writes down what it is told."""

    stage_index: int
    num_stages: int
    group_rank: int
    group_size: int
    log: list
    submod: None = None
    stage_index_to_group_rank: dict = field(default_factory=dict)

    @property
    def is_first(self):
        return self.stage_index == 0

    @property
    def is_last(self):
        return self.stage_index == self.num_stages - 1

    def forward_one_chunk(self, index, *inputs, **options):
        self.log.append(Action(self.stage_index, "F", index))

    def backward_one_chunk(self, index, loss, full_backward=True, **options):
        kind = "B" if full_backward else "I"
        self.log.append(Action(self.stage_index, kind, index))

    def backward_weight_one_chunk(self, index, **options):
        self.log.append(Action(self.stage_index, "W", index))

    def nothing(self, *inputs, **options):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing
    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = nothing
    perform_reduce_grad = nothing


def run_by_torch(name, pp, n, vpp, rank, monkeypatch):
    """Return what one rank does when PyTorch runs a step of a schedule."""
    schedule, log = get_schedule_class(name), []
    layout = Layout(pp=pp, vpp=vpp)
    shape = {"ZBVZeroBubble": "zbv", "DualPipeV": "dualpipev"}.get(name, "1f1b")
    recording = [
        RecordingStage(index, pp * vpp, rank, pp, log)
        for index in stages.virtual_stages(layout, rank, shape)
    ]
    is_single = issubclass(schedule, PipelineScheduleSingle)
    made = schedule(recording[0] if is_single else recording, n)
    for prepare in ("_initialize_stage", "_initialize_stages"):
        monkeypatch.setattr(made, prepare, lambda *inputs: None, raising=False)
    made._step_microbatches()
    return log


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize(
    ("schedule", "vpp", "in_torch"),
    [
        ("gpipe", 1, "GPipe"),
        ("gpipe", 2, "LoopedBFS"),
        ("1f1b", 1, "1F1B"),
        ("1f1b", 2, "Interleaved1F1B"),
        ("1f1b", 3, "Interleaved1F1B"),
        ("zero-bubble", 1, "InterleavedZeroBubble"),
        ("zero-bubble", 2, "InterleavedZeroBubble"),
        ("zbv", 2, "ZBVZeroBubble"),
        ("dualpipev", 2, "DualPipeV"),
    ],
)
def test_ranks_do_what_pytorch_makes_them_do(
    schedule, vpp, in_torch, pp, rounds, monkeypatch
):
    n = pp * rounds
    listed = orders(schedule, pp, n, vpp=vpp)
    for rank in range(pp):
        ran = run_by_torch(in_torch, pp, n, vpp, rank, monkeypatch)
        assert list(actions_of(listed[rank])) == ran


def test_the_listing_of_1f1b_in_pytorch_is_wrong_and_not_used():
    # Where this fails, PyTorch has mended it, and our own table may go.
    stage = RecordingStage(0, 2, 0, 2, [])
    listed = get_schedule_class("1F1B")(stage, 2).pipeline_order[1]

    assert [str(action) for action in listed if action.is_compute_op] == [
        *("1F1", "1B0", "1F2", "1B1")
    ]
    assert written(orders("1f1b", 2, 2)[1]) == "1F0 1B0 1F1 1B1"


def test_schedules_have_the_names_that_memory_knows():
    assert SCHEDULES == stages.SCHEDULES
    assert V_SHAPED == stages.V_SHAPED


def test_dualpipe_by_hand_where_two_ranks_meet():
    # Both ranks hold both stages. Rank 0 is fed 0 and 1, rank 1 is fed 2 and 3; each
    # first lets one of its own through, then takes one from the other in turn.
    near, far = map(written, orders("dualpipe", 2, 4))

    assert near == "0F0 1F2 0F1 1B2 1F3+0B0 1B3 0I1 0W1"
    assert far == "0F2 1F0 0F3 1B0 1F1+0B2 1B1 0I3 0W3"


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_dualpipe_has_the_phases_of_its_authors(pp):
    # Section 3.2.1 of the DeepSeek-V3 report, figure 5: rank 0 of 8 first does six
    # forward passes of its own, and is never paired before it has met the other half.
    order = [step for step in orders("dualpipe", pp, 4 * pp)[0]]
    n_alone = next(i for i, step in enumerate(order) if step[0].stage != 0)

    assert n_alone == pp - 1
    assert [len(step) for step in order[:n_alone]] == [1] * n_alone


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_the_two_halves_of_dualpipe_mirror_each_other(pp):
    n = 3 * pp
    ranks = orders("dualpipe", pp, n)
    half = n // 2
    for rank, order in enumerate(ranks):
        swapped = [
            a._replace(micro_batch=(a.micro_batch + half) % n)
            for a in actions_of(order)
        ]
        assert swapped == list(actions_of(ranks[pp - 1 - rank]))


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_dualpipe_puts_every_stage_on_the_two_ranks_that_memory_says(pp):
    for rank, order in enumerate(orders("dualpipe", pp, 2 * pp)):
        held = Counter(action.stage for action in actions_of(order))
        expected = stages.virtual_stages(Layout(pp=pp), rank, "dualpipe")
        assert set(held) == set(expected)


def test_overlapped_pairs_are_a_forward_and_a_backward():
    pairs = [step for step in orders("dualpipev", 4, 8)[0] if len(step) > 1]

    assert pairs
    assert {tuple(action.kind for action in pair) for pair in pairs} == {("F", "B")}


def test_an_order_is_read_as_it_is_written():
    made = orders("dualpipev", 2, 4)

    assert parse([written(order) for order in made]) == made


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: orders("ring", 2, 4),
            "schedule must be one of '1f1b', 'gpipe', 'zero-bubble', 'zbv', 'dualpipev'"
            ", 'dualpipe'; got 'ring'. Set schedule='1f1b' or another of these.",
        ),
        (
            lambda: orders("zbv", 2, 4, vpp=3),
            "schedule='zbv' needs vpp=2; got vpp=3. Set vpp=2 or leave it out.",
        ),
        (
            lambda: orders("1f1b", 4, 3),
            "schedule='1f1b' needs at least 4 micro-batches to fill pp=4 ranks; got "
            "micro_batches=3. Set micro_batches=4 or lower pp.",
        ),
        (
            lambda: orders("dualpipe", 3, 8),
            "needs an even number of each; got pp=3 and micro_batches=8. Set pp=4 and "
            "micro_batches=8.",
        ),
        (
            lambda: orders("dualpipe", 4, 6),
            "schedule='dualpipe' needs at least 8 micro-batches to fill pp=4 ranks",
        ),
        (
            lambda: orders("1f1b", 4, 9, vpp=2),
            "schedule='1f1b' with vpp=2 takes micro-batches in 2 equal rounds of at "
            "least pp=4; got micro_batches=9. Set micro_batches=8 or 12.",
        ),
        (
            lambda: parse(["0F0 0X0"]),
            "an action must be a stage, one of F, B, I and W, and a micro-batch, as "
            "2F0, or a pair of them, as 2F1+2B0; got '0X0'. Correct the order.",
        ),
        (
            lambda: chunks_per_rank("1f1b", 0),
            "vpp must be a whole number of at least 1; got 0.",
        ),
    ],
)
def test_what_cannot_run_is_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("in_torch", "schedule", "vpp", "refused"),
    [
        ("1F1B", "1f1b", 1, 3),
        ("Interleaved1F1B", "1f1b", 2, 9),
        ("InterleavedZeroBubble", "zero-bubble", 2, 9),
        ("DualPipeV", "dualpipev", 2, 7),
    ],
)
def test_pytorch_refuses_the_same(in_torch, schedule, vpp, refused):
    stage = [RecordingStage(0, 4 * vpp, 0, 4, []) for _ in range(vpp)]
    with pytest.raises(ValueError):
        get_schedule_class(in_torch)(stage[0] if vpp == 1 else stage, refused)
    with pytest.raises(ValueError, match="Set micro_batches="):
        orders(schedule, 4, refused, vpp=vpp)
