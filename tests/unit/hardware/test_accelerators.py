import pytest

from labkit.hardware import ACCELERATORS, accelerator

REQUESTED = [
    *("v100", "a100-40g", "a100-80g", "a10", "l4", "l40s"),
    *("rtx3090", "rtx4090", "rtx5090"),
    *("h100", "h100-pcie", "h200", "h800", "h20", "b200", "mi300x"),
]


def test_the_table_holds_every_accelerator_of_the_book():
    assert list(ACCELERATORS) == REQUESTED


def test_h800_has_the_numbers_that_deepseek_published():
    h800 = accelerator("h800")

    assert h800.flops("bfloat16") == 990e12
    assert h800.memory_bytes_per_second == 3.35e12
    assert h800.link_bytes_per_second == 200e9  # 400 GB/s in both directions
    assert h800.network_bytes_per_second == 50e9  # a 400 Gb/s port each
    assert h800.memory_bytes == 81559 * 2**20


def test_h800_is_an_h100_with_a_cut_link():
    h100, h800 = accelerator("h100"), accelerator("h800")

    assert h800.flops("fp8") == pytest.approx(h100.flops("fp8"), rel=1e-3)
    assert h800.memory_bytes == h100.memory_bytes
    assert h800.link_bytes_per_second < h100.link_bytes_per_second / 2


def test_names_are_read_in_any_case():
    assert accelerator("MI300X") is ACCELERATORS["mi300x"]


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError) as caught:
        accelerator("h900")
    assert str(caught.value) == (
        "accelerator must be one of v100, a100-40g, a100-80g, a10, l4, l40s, rtx3090, "
        "rtx4090, rtx5090, h100, h100-pcie, h200, h800, h20, b200, mi300x; got 'h900'. "
        "Add a row to data/hardware.csv for another."
    )


def test_an_a100_stores_fp8_but_does_not_multiply_it():
    a100 = accelerator("a100-80g")

    assert a100.fp8_flops is None
    assert a100.fp8_format is None
    with pytest.raises(ValueError) as caught:
        a100.flops("fp8")
    assert str(caught.value) == (
        "dtype must be one that a100-80g multiplies; got 'fp8'. "
        "Use one of float32, float16, bfloat16."
    )


def test_a_v100_has_no_bfloat16():
    assert accelerator("v100").dtypes == ("float32", "float16")


@pytest.mark.parametrize("name", REQUESTED)
def test_rates_are_dense_and_stand_in_the_known_ratios(name):
    found = ACCELERATORS[name]

    assert found.fp16_flops > found.fp32_flops
    if found.bf16_flops is not None:
        assert found.bf16_flops == found.fp16_flops
    # A sparse figure taken for a dense one would show here as a factor of two.
    assert (found.fp8_flops is None) == (found.fp8_format is None)
    if found.fp8_flops is not None:
        assert found.fp8_flops == pytest.approx(2 * found.bf16_flops, rel=0.02)


@pytest.mark.parametrize("name", REQUESTED)
def test_memory_is_within_a_tenth_of_the_label(name):
    found = ACCELERATORS[name]
    label_gb = int(found.label.split()[-2])

    assert 0.9 * label_gb <= found.memory_bytes / 2**30 <= label_gb + 1


@pytest.mark.parametrize("name", REQUESTED)
def test_the_link_is_faster_than_the_network(name):
    found = ACCELERATORS[name]

    assert found.link_bytes_per_second > found.network_bytes_per_second
    assert found.link_bytes_per_second < found.memory_bytes_per_second


def test_the_repr_reads_as_a_data_sheet():
    assert repr(accelerator("l4")) == (
        "Accelerator(NVIDIA L4 24 GB: 22.5 GiB at 300 GB/s; float32 30.3 TFLOP/s, "
        "float16 121 TFLOP/s, bfloat16 121 TFLOP/s, fp8 242 TFLOP/s; PCIe 4.0 x16 "
        "32 GB/s, network 3.1 GB/s a direction)"
    )
