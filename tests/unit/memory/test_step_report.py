"""What a step holds beside its tape: gradient buffers, messages, copies of weights."""

from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory import STATES, predict
from labkit.memory.recompute import RECOMPUTE_POLICIES
from labkit.memory.stages import SCHEDULES, V_SHAPED
from labkit.model import Transformer

TINY = PRESETS["tiny"]
TRAIN = TrainConfig(micro_batch=1, global_batch=8, seq_len=64)


def last(report, name):
    return [x.by_part for x in report.timeline if x.name == name][-1]


BF16_ALONE = replace(STATES["megatron"], gradients="bfloat16", master="int16")


@pytest.mark.parametrize(
    "states", [STATES["megatron"], replace(STATES["megatron"], has_buffer=False)]
)
@pytest.mark.parametrize("layout", [None, Layout(dp=2), Layout(pp=2)], ids=str)
def test_gradients_in_fp32_beside_bf16_weights_lie_in_a_buffer_throughout(
    states, layout
):
    report = predict(TINY, TRAIN, layout, states=states)

    assert len({instant.by_part["gradients"] for instant in report.timeline}) == 1


@pytest.mark.parametrize("layout", [None, Layout(dp=2), Layout(pp=2)], ids=str)
def test_a_gradient_buffer_in_the_weights_dtype_is_there_throughout_and_needs_no_copy(
    layout,
):
    step = replace(TRAIN, global_batch=2)
    wider = predict(TINY, step, layout, states=STATES["megatron"])
    report = predict(TINY, step, layout, states=BF16_ALONE)

    for instant, other in zip(report.timeline, wider.timeline, strict=True):
        assert instant.by_part["gradients"] == other.by_part["gradients"] // 2
        assert "communication" not in instant.by_part


def test_gradients_in_the_weights_dtype_without_a_buffer_come_with_the_backward():
    states = replace(BF16_ALONE, has_buffer=False)
    report = predict(TINY, replace(TRAIN, global_batch=2), Layout(dp=2), states=states)

    assert "gradients" not in report.timeline[0].by_part
    assert last(report, "after backward")["communication"] > 0


def test_gradients_are_copied_into_a_message_when_ranks_sum_them():
    def message(**options):
        report = predict(TINY, TRAIN, **options)
        return last(report, "after backward").get("communication", 0)

    model = Transformer(TINY, device="meta")
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert message() == 0
    assert message(layout=Layout(dp=2)) == n_bytes


def copied_weights(model):
    """Return the bytes of BF16 copies that autocast makes of layers' weights."""
    linears = [x for x in model.layers.modules() if isinstance(x, torch.nn.Linear)]
    return sum(2 * linear.weight.numel() for linear in linears)


@pytest.mark.parametrize("layout", [None, Layout(pp=2), Layout(pp=2, vpp=2)], ids=str)
def test_autocast_holds_copies_of_weights_to_the_end_of_a_micro_batchs_forward(layout):
    cfg = replace(TINY, n_layers=4, moe=None, n_dense_layers=0, mtp=None)
    train = replace(TRAIN, global_batch=2, precision="bf16")
    n_chunks = 1 if layout is None else layout.pp * layout.vpp
    report = predict(
        cfg,
        train,
        layout,
        recompute="full",
        layers_per_stage=[cfg.n_layers // n_chunks] * n_chunks,
    )
    n_copies = copied_weights(Transformer(cfg, device="meta"))

    for stage in report.by_stage or (report,):
        held = last(stage, "forward")["temporaries"]
        batch = last(stage, "end of forward")["temporaries"]
        assert held - batch == n_copies // n_chunks


@pytest.mark.parametrize("policy", [*RECOMPUTE_POLICIES])
@pytest.mark.parametrize("layout", [None, Layout(pp=2)], ids=str)
def test_a_bf16_model_holds_no_copies_of_weights_that_run_again(policy, layout):
    report = predict(TINY, TRAIN, layout, recompute=policy, states=STATES["megatron"])
    forward, end = (last(report, name) for name in ("forward", "end of forward"))

    assert forward["temporaries"] == end["temporaries"]


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("states", ["trainer", "megatron"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_without_layers_or_ends_holds_nothing(schedule, states, zero):
    layout = Layout(pp=4, dp=2, ep=2, vpp=2 if schedule in V_SHAPED else 1)
    split = [2] + [0] * (layout.pp * layout.vpp - 2) + [2]
    report = predict(
        TINY,
        TRAIN,
        layout,
        schedule=schedule,
        layers_per_stage=split,
        states=STATES[states],
        zero=zero,
    )

    assert [stage.peak > 0 for stage in report.by_stage] == [
        True,
        False,
        False,
        schedule not in V_SHAPED,
    ]
    assert report.by_stage[1].by_module == {}


def test_a_rank_without_experts_sends_no_rows():
    # All but the first of four layers have experts; the head's MTP module too.
    first, second = predict(
        TINY, TRAIN, Layout(pp=2, dp=2, ep=2), layers_per_stage=[1, 3], zero=2
    ).by_stage

    assert last(first, "forward").get("communication", 0) == 0
    assert last(second, "forward")["communication"] > 0
