"""Layers of DeepSeek-V3 in their full size, on fake tensors."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from labkit.config import PRESETS, TrainConfig
from labkit.memory.activations import block_tape
from labkit.memory.fakes import faked
from labkit.memory.full_size import local_experts, measure_stage, predict_stage
from labkit.memory.kept_attention import rotations
from labkit.memory.playback import kept_by_part
from labkit.memory.recompute import apply_recompute
from labkit.memory.report import MemoryReport
from labkit.memory.tape import Pass
from labkit.model.transformer import Block
from labkit.precision.convert import convert
from labkit.precision.kept_formats import kept_formats

V3 = PRESETS["v3-671b"]
LOCAL = replace(V3.moe, n_routed_experts=32, n_expert_groups=1, n_limited_groups=1)
"""The experts of one rank of eight."""


@pytest.mark.usefixtures("unchecked")  # operators by the thousand
def test_an_moe_layer_keeps_the_predicted_bytes():
    cfg, bf16 = replace(V3, moe=LOCAL), torch.bfloat16
    step = Pass(batch=1, seq_len=640, weights=bf16, compute=bf16, n_rows=8 * 640)
    with torch.device("meta"):
        block = Block(cfg, is_dense=False).to(bf16)
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        faked(block)
        x = torch.empty(1, 640, cfg.dim, dtype=bf16).requires_grad_()
        turns = torch.empty(640, 32, dtype=torch.complex64)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, turns)
    for parameter in block.parameters():
        storages.pop(parameter.untyped_storage()._cdata, None)
    tape = block_tape(cfg, step, is_dense=False, stream=bf16)
    predicted = kept_by_part([*tape, rotations(cfg.attention, step)])

    assert sum(s.nbytes() for s in storages.values()) == sum(predicted.values())


@pytest.mark.usefixtures("unchecked")
def test_a_stage_of_full_width_is_measured_to_the_predicted_bytes():
    cfg = local_experts(V3, 32)  # 8 experts, all of them chosen
    train = TrainConfig(micro_batch=1, global_batch=1, seq_len=256)
    measured = measure_stage(cfg, train, 2)
    predicted = predict_stage(cfg, train, 2)
    kept, expected = (
        next(x.by_part for x in report.timeline if x.name == "end of forward")
        for report in (measured, predicted)
    )

    assert kept["activations"] == expected["activations"]
    for part in ("weights", "gradients"):
        assert measured.by_part[part] == predicted.by_part[part]
    # The prediction has an optimizer.
    peak = predicted.peak - predicted.by_part["moments"]
    assert peak == pytest.approx(measured.peak, rel=0.05)


@pytest.mark.usefixtures("unchecked")
def test_a_dense_stage_is_measured_and_predicted_alike():
    cfg = replace(PRESETS["small"], moe=None, n_dense_layers=0)
    train = TrainConfig(micro_batch=2, global_batch=2, seq_len=64)
    reports = measure_stage(cfg, train, 3), predict_stage(cfg, train, 3)
    measured, predicted = (report.by_part["activations"] for report in reports)

    assert measured == predicted


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_stage_in_fp8_keeps_what_is_predicted_of_it(recompute):
    small = replace(PRESETS["small"], n_dense_layers=0, mtp=None, n_layers=1)
    cfg = local_experts(small, 2)
    train = TrainConfig(micro_batch=2, global_batch=2, seq_len=32)
    formats = kept_formats(cfg)
    predicted = predict_stage(cfg, train, 1, recompute=recompute, cached=formats)
    measured = measure_stage(
        cfg, train, 1, change=lambda model: convert(apply_recompute(model, recompute))
    )

    assert kept_of(predicted) == kept_of(measured)


def kept_of(report: MemoryReport) -> int:
    (last,) = (x for x in report.timeline if x.name == "end of forward")
    return last.by_part["activations"]


def test_experts_are_shared_out_equally():
    with pytest.raises(ValueError) as error:
        local_experts(V3, 3)

    assert str(error.value) == (
        "ep must divide n_routed_experts; got ep=3 and 256. Take a model with experts, "
        "and a divisor of their number."
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_layers_and_ranks_are_counted_from_one(count):
    with pytest.raises(ValueError, match="ep must be a whole number of at least 1"):
        local_experts(V3, count)
    for stage in (measure_stage, predict_stage):
        with pytest.raises(ValueError, match="n_layers must be a whole number of at l"):
            stage(V3, TrainConfig(), count)
