"""A forward and a backward pass at once, without processes."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineContext,
)

from labkit.parallel.pipeline.overlap import Overlap

PATIENCE = 30.0


@dataclass
class MeetingStage:
    """A stage whose pass ends when that of another stage has begun."""

    stage_index: int
    meeting: threading.Barrier
    log: list
    is_last: bool = False
    threads: list[int] = field(default_factory=list)

    def forward_one_chunk(self, index, args, kwargs, *, save_forward_output):
        self.meeting.wait(PATIENCE)
        self.threads.append(threading.get_ident())
        return f"output {index}"

    def backward_one_chunk(self, index, *, loss, full_backward, last_backward):
        self.meeting.wait(PATIENCE)
        self.threads.append(threading.get_ident())
        self.log.append((loss, full_backward, last_backward))

    def set_local_fwd_input(self, output, index):
        self.log.append(f"{self.stage_index} reads {output}")

    def get_local_bwd_output(self, index):
        return f"gradient {index}"

    def set_local_bwd_input(self, gradient, index):
        self.log.append(f"{self.stage_index} reads {gradient}")


def pair_of(stages, n_micro_batches=2):
    """Return the context of a pair: stage 1 forward, stage 2 backward, on one rank."""
    schedule = SimpleNamespace(
        _stages=stages,
        _n_microbatches=n_micro_batches,
        backward_counter={2: 1},
        fwd_recv_ops={(1, 1): []},
        bwd_recv_ops={(2, 0): []},
        _assert_unsharded=lambda stage: None,
        _maybe_get_loss=lambda stage, index: f"loss {index}",
        _maybe_compute_loss=lambda *args: None,
    )
    context = _PipelineContext(schedule, arg_mbs=[(), ()], kwarg_mbs=[{}, {}])
    forward = _Action(1, _ComputationType.FORWARD, 1)
    backward = _Action(2, _ComputationType.FULL_BACKWARD, 0)
    both = _Action(-1, _ComputationType.OVERLAP_F_B, None, (forward, backward))
    return both, context


def test_each_pass_of_a_pair_goes_on_while_the_other_waits():
    meeting, log = threading.Barrier(2), []
    stages = [MeetingStage(index, meeting, log) for index in (1, 2)]
    overlap = Overlap()
    with overlap.thread():
        overlap(*pair_of(stages))

    # One after the other, the first would have waited for the second in vain.
    assert stages[0].threads == [threading.get_ident()]
    assert stages[1].threads != stages[0].threads
    assert sorted(log, key=str) == [
        ("loss 0", True, True),
        "1 reads gradient 0",
        "2 reads output 1",
    ]


def test_a_failure_of_the_other_thread_is_raised_and_the_thread_ends():
    class FailingStage(MeetingStage):
        def backward_one_chunk(self, *args, **kwargs):
            self.meeting.wait(PATIENCE)
            raise ArithmeticError("no gradient")

    meeting = threading.Barrier(2)
    stages = [MeetingStage(1, meeting, []), FailingStage(2, meeting, [])]
    overlap, before = Overlap(), threading.active_count()
    with pytest.raises(ArithmeticError, match="no gradient"), overlap.thread():
        overlap(*pair_of(stages))
    assert threading.active_count() == before
