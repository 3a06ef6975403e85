"""What devices do with FP8, by the table of accelerators."""

import pytest

from labkit.hardware import ACCELERATORS
from labkit.precision.units import HOPPER, fp8_units


@pytest.mark.parametrize(
    ("device", "backend", "multiplies"),
    [
        ("v100", "storage", False),
        ("a100-40g", "storage", False),
        ("a100-80g", "storage", False),
        ("rtx3090", "storage", False),
        ("l4", "rowwise", True),
        ("rtx4090", "rowwise", True),
        ("h100", "hopper", True),
        ("h800", "hopper", True),
        ("h20", "hopper", True),
        ("b200", "mxfp8", True),
        ("rtx5090", "mxfp8", True),
        ("mi300x", "storage", False),
        ("cpu", "emulate", False),
    ],
)
def test_each_device_takes_fp8_in_its_way(device, backend, multiplies):
    units = fp8_units(device)
    assert (units.backend, units.multiplies) == (backend, multiplies)
    assert units.reason


def test_hopper_is_in_the_table_and_multiplies_fp8():
    assert all(ACCELERATORS[name].fp8_flops for name in HOPPER)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_only_what_has_fp8_units_multiplies_fp8(name):
    has_units = ACCELERATORS[name].fp8_flops is not None
    assert has_units or not fp8_units(name).multiplies


def test_only_a_v100_lacks_bf16():
    lacking = [name for name in ACCELERATORS if fp8_units(name).high == "fp32"]
    assert lacking == ["v100"]


def test_blackwell_scales_blocks_of_32_by_powers_of_two_whatever_is_asked():
    units = fp8_units("b200", scale="fp32")
    assert units.inputs.tile == units.weights.tile == (1, 32)
    assert units.inputs.scale == units.weights.scale == "po2"


def test_a_cpu_needs_powers_of_two_to_be_exact():
    assert fp8_units("cpu", scale="fp32").inputs.scale == "po2"


@pytest.mark.parametrize("scale", ["fp32", "po2"])
def test_hopper_takes_either_scale_in_the_published_tiles(scale):
    units = fp8_units("H800", scale=scale)
    assert units.device == "h800"
    assert (units.inputs.tile, units.weights.tile) == ((1, 128), (128, 128))
    assert units.inputs.scale == units.weights.scale == scale


def test_an_unknown_device_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="^hardware must be one of 'cpu', 'v100', 'a1"):
        fp8_units("h900")
