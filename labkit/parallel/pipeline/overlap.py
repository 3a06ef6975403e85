"""A forward pass and a backward pass at the same time, in two threads.

DualPipeV pairs the forward pass of one micro-batch with the backward pass of another,
through another stage on the same rank, so that the one computes while the other waits
for its communication. PyTorch has the pairs in its order and runs them one after the
other, unless it is told how to run them at once: this is told here.

The two passes exchange tokens at the same time, so that their stages must not share
groups of processes: messages of one would be taken for messages of the other.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineContext,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)
from torch.distributed.pipelining.stage import _PipelineStageBase


class Overlap:
    """Runs overlapped pairs: the forward pass in the calling thread, the other beside.

    Settings that hold for one thread, such as those of autocast, are set where the
    forward pass runs. The other thread lives as long as the context of `thread`.
    """

    def __init__(self) -> None:
        self._beside: Executor | None = None

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Keep a second thread, as long as a step lasts."""
        with ThreadPoolExecutor(1) as self._beside:
            yield
        self._beside = None

    def __call__(self, action: _Action, context: _PipelineContext) -> None:
        kinds = {each.computation_type: each for each in action.sub_actions}
        forward = kinds[_ComputationType.FORWARD]
        backward = kinds[_ComputationType.FULL_BACKWARD]
        pair = _Pair(context)
        pair.receive(forward, backward)
        behind = self._beside.submit(pair.backward_pass(backward))
        pair.forward_pass(forward)
        behind.result()
        pair.hand_back(backward)


class _Pair:
    """What PyTorch's runtime does around a pass, taken apart to fit two threads."""

    def __init__(self, context: _PipelineContext) -> None:
        self.context = context
        self.schedule: _PipelineScheduleRuntime = context.schedule_ref
        self.stages: dict[int, _PipelineStageBase] = {
            stage.stage_index: stage for stage in self.schedule._stages
        }

    def receive(self, forward: _Action, backward: _Action) -> None:
        """Wait for what both passes read, and for their weights."""
        at, index = forward.stage_index, forward.microbatch_index
        if at > 0 and at - 1 not in self.stages:
            _wait_batch_p2p(self.schedule.fwd_recv_ops.pop((at, index)))
        at, index = backward.stage_index, backward.microbatch_index
        if not self.stages[at].is_last and at + 1 not in self.stages:
            _wait_batch_p2p(self.schedule.bwd_recv_ops.pop((at, index)))
        for action in (forward, backward):
            self.schedule._assert_unsharded(self.stages[action.stage_index])

    def backward_pass(self, action: _Action) -> Callable[[], None]:
        """Return the backward pass, to be run in another thread."""
        schedule, stage = self.schedule, self.stages[action.stage_index]
        index = action.microbatch_index
        loss = schedule._maybe_get_loss(stage, index)
        schedule.backward_counter[action.stage_index] += 1
        n_done = schedule.backward_counter[action.stage_index]
        is_last = n_done == schedule._n_microbatches
        return lambda: stage.backward_one_chunk(
            index, loss=loss, full_backward=True, last_backward=is_last
        )

    def forward_pass(self, action: _Action) -> None:
        """Run the forward pass, and pass its result on to a stage on this rank."""
        context, stage = self.context, self.stages[action.stage_index]
        index = action.microbatch_index
        output = stage.forward_one_chunk(
            index,
            context.arg_mbs[index],
            context.kwarg_mbs[index],
            save_forward_output=False,
        )
        self.schedule._maybe_compute_loss(stage, output, context.target_mbs, index)
        following = self.stages.get(action.stage_index + 1)
        if following is not None:
            following.set_local_fwd_input(output, index)

    def hand_back(self, action: _Action) -> None:
        """Pass the gradient of the input on to a stage on this rank."""
        stage, index = self.stages[action.stage_index], action.microbatch_index
        preceding = self.stages.get(action.stage_index - 1)
        if preceding is not None:
            preceding.set_local_bwd_input(stage.get_local_bwd_output(index), index)
