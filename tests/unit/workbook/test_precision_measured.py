"""What the notebook on precision measures, on parts small enough to count by hand."""

import pytest
import torch

from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.precision.scheduler import Decision
from labkit.training.decisions import Rollback
from labkit.workbook import precision

N, D = 64, 128


@pytest.fixture
def x():
    return torch.ones(N, D, dtype=torch.bfloat16)


def kept(make, way, x):
    part = make().bfloat16()
    way(part)
    return precision.kept_bytes(part, x)


def nothing(part):
    """Leave a part in BF16."""


def test_a_linear_layer_keeps_a_byte_a_value_and_a_scale_per_tile(x):
    assert kept(lambda: Linear(D, D), nothing, x) == 2 * N * D
    assert kept(lambda: Linear(D, D), precision.convert_together, x) == N * (D + 1)


def test_three_layers_share_a_copy_or_keep_three(x):
    def make():
        return precision.Projections(D)

    assert kept(make, nothing, x) == 2 * N * D
    assert kept(make, precision.convert_together, x) == N * (D + 1)
    assert kept(make, precision.convert_alone, x) == 3 * N * (D + 1)


def test_a_network_converted_layer_by_layer_keeps_what_swiglu_read(x):
    def make():
        return MLP(D, 2 * D)

    hidden, scales = 2 * D, 2
    own_inputs = 2 * (D + 1) + hidden + scales
    gate_up_and_silu = 3 * 2 * hidden
    alone = kept(make, precision.convert_alone, x)
    together = kept(make, precision.convert_together, x)

    assert alone == N * (own_inputs + gate_up_and_silu)
    assert together == N * (D + 1 + 2 * (hidden + scales))


def test_fp8_lowers_what_every_kind_of_module_keeps_that_is_linear():
    bf16, fp8 = (precision.layer_bytes(name) for name in ("bf16", "deepseek-v3"))
    linear = {"attention", "routed experts", "shared experts"}

    assert bf16.keys() == fp8.keys() == linear | {"router", "norms"}
    assert all(fp8[kind] < bf16[kind] for kind in linear)


def test_gradients_in_fp8_differ_from_those_in_bf16():
    bf16, fp8 = precision.gradient("bf16"), precision.gradient("deepseek-v3")

    assert 0.02 < (fp8 - bf16).norm() / bf16.norm() < 0.3


def test_runs_of_one_seed_begin_alike_and_go_apart():
    bf16, fp8 = (precision.losses(kind, 1, 2) for kind in ("bf16", "fp8"))

    assert fp8[0] == pytest.approx(bf16[0], rel=1e-2)
    assert fp8 != bf16
    (other,) = precision.steps_to(precision.new_trainer("bf16", 2), 1)
    assert other.loss_main != bf16[0]


def test_gaps_are_of_window_means_of_partners():
    runs = [[9.0, 9.0, 3.0, 1.0], [9.0, 9.0, 2.0, 2.0]]
    reference = [[9.0, 9.0, 2.0, 2.0], [6.0, 12.0, 4.0, 1.0]]

    found = precision.window_gaps(runs, reference, window=2)
    assert found == [[0.0, 0.0], [0.0, -20.0]]


def changed(step, module, before, after, signal="healthy"):
    return Decision(
        step=step, module=module, signal=signal, value=1.0, before=before, after=after
    )


def test_modules_that_change_together_share_a_row_and_rollbacks_say_why():
    entries = [
        changed(4, "layers.1.attn.wo", "high", "fp8"),
        changed(4, "layers.2.attn.wo", "high", "fp8"),
        changed(5, "layers.1.attn.wo", "fp8", "high", signal="fprop underflow"),
        Rollback(step=5, since=5, back_to=0, cause="the loss is not finite"),
    ]

    assert [tuple(row.values()) for row in precision.what_happened(entries)] == [
        (4, "layers.1.attn.wo and 1 more", "high → fp8", "healthy"),
        (5, "layers.1.attn.wo", "fp8 → high", "fprop underflow"),
        (5, "all", "rolled back to step 0", "the loss is not finite"),
    ]
