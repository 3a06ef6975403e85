"""FP8 files with both kinds of scales: read by a script, written again, refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from labkit.config import MLAConfig, ModelConfig, MoEConfig, MTPConfig
from labkit.model import Transformer, load_hf, save_hf
from labkit.model.checkpoint_fp8 import dequantize_into, quantize_blocks
from labkit.precision import QTensor, QuantSpec, quantize

# No side of a matrix is a multiple of 128, and every kind of matrix is there.
CONFIG = ModelConfig(
    vocab_size=20,
    dim=136,
    n_layers=2,
    inter_dim=260,
    attention=MLAConfig(
        n_heads=2,
        q_lora_rank=130,
        kv_lora_rank=129,
        qk_nope_head_dim=60,
        qk_rope_head_dim=10,
        v_head_dim=70,
    ),
    moe=MoEConfig(n_routed_experts=3, n_activated_experts=1, moe_inter_dim=140),
    mtp=MTPConfig(),
)
KINDS = ("fp32", "po2")
EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Random weights; one expert is all zeros, and one too small for a scale."""
    model = Transformer(CONFIG, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for router in model.routers():
            router.bias.uniform_(-3, 3)
        model.layers[1].ffn.experts.w2[0].zero_()
        model.layers[1].ffn.experts.w2[1].mul_(1e-13)
    return model


def dequantized(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file, with nothing but numpy.

    A file is 8 bytes of length, a JSON object of so many bytes, and the values.
    """
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        data = content[start:][slice(*entry["data_offsets"])]
        if entry["dtype"] == "F8_E4M3":  # sign, 4 bits of exponent, 3 of mantissa
            code = np.frombuffer(data, np.uint8).astype(np.int32)
            exponent, mantissa = code >> 3 & 15, code & 7
            normal = (8 + mantissa) * 2.0 ** (exponent - 10)
            values = np.where(exponent == 0, mantissa * 2.0**-9, normal)
            values = np.where(code >> 7, -values, values)
        elif entry["dtype"] == "BF16":
            values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(data, {"F32": "<f4"}[entry["dtype"]])
        found[name] = values.reshape(entry["shape"]).astype(np.float32)
    for name in [name for name in found if name.endswith("_scale_inv")]:
        scale = found.pop(name).repeat(128, axis=0).repeat(128, axis=1)
        rows, columns = found[name.removesuffix("_scale_inv")].shape
        found[name.removesuffix("_scale_inv")] *= scale[:rows, :columns]
    return found


@pytest.mark.parametrize("scale", KINDS)
def test_a_script_without_this_library_reads_the_same_weights(model, tmp_path, scale):
    save_hf(model, tmp_path / "fp8", fp8=True, scale=scale)
    loaded = load_hf(tmp_path / "fp8", dtype=torch.float32)
    save_hf(loaded, tmp_path / "plain")

    read = dequantized(tmp_path / "fp8/model.safetensors")
    ours = load_file(tmp_path / "plain/model.safetensors")
    assert read.keys() == ours.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(read[name], tensor.numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [("fp32", torch.float32), ("po2", torch.float32), ("po2", torch.bfloat16)],
    ids=str,
)
def test_a_file_that_is_read_and_written_again_has_the_same_bytes(
    model, tmp_path, scale, dtype
):
    save_hf(model, tmp_path / "first", fp8=True, scale=scale)
    loaded = load_hf(tmp_path / "first", dtype=dtype)
    save_hf(loaded, tmp_path / "second", fp8=True, scale=scale)
    for name in ("model.safetensors", "config.json"):
        first, second = (tmp_path / run / name for run in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()

    again = load_hf(tmp_path / "second", dtype=dtype).state_dict()
    assert all(torch.equal(again[n], t) for n, t in loaded.state_dict().items())


@settings(max_examples=40)
@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 140),
    exponent=st.integers(-60, 60),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 2**31),
)
def test_any_matrix_is_written_again_as_the_same_bytes(
    rows, columns, exponent, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    for scale, kept in (("po2", dtype), ("fp32", torch.float32)):
        values, scales = quantize_blocks(weight.to(dtype), scale=scale)
        restored = torch.empty(rows, columns, dtype=kept)
        dequantize_into(restored, values, scales)
        again, same_scales = quantize_blocks(restored, scale=scale)
        assert torch.equal(scales, same_scales)
        assert torch.equal(values.view(torch.uint8), again.view(torch.uint8))


def matrix_of_many_sizes(n_rows: int, n_columns: int) -> torch.Tensor:
    """Return blocks of many magnitudes, and some of special ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_rows, n_columns, generator=generator)
    x *= torch.exp(2 * torch.randn(n_rows, 1, generator=generator))
    x[:128, :128] = 0
    x[:128, 128:256] *= 1e-15
    x[129:, :128] = x[129:, :128].clamp(-225, 225) / 225
    x[128:129, :128] = 225 * 2.0**-9  # rounds to 224
    x[130:131, 300:301], x[300:301, 5:6] = math.inf, math.nan
    return x


def with_448_for_224(q: QTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales in which no block's largest value is 224."""
    values, scales = q.data.float(), q.scale.float()
    for i, rows in enumerate(values.split(128)):
        for j, block in enumerate(rows.split(128, dim=1)):
            if block.abs().max() == 224:
                block *= 2
                scales[i, j] /= 2
    return values.to(q.data.dtype), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(700, 500), (128, 256), (1, 200)], ids=str)
def test_blocks_are_those_that_products_in_fp8_multiply(shape, dtype):
    weight = matrix_of_many_sizes(*shape).to(dtype)
    for scale in KINDS:
        q = quantize(weight, QuantSpec(tile=(128, 128), scale=scale))
        expected = with_448_for_224(q) if scale == "po2" else (q.data, q.scale)
        values, scales = quantize_blocks(weight, scale=scale)
        assert torch.equal(values.view(torch.uint8), expected[0].view(torch.uint8))
        exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(scales, expected[1], **exactly)

        restored = torch.empty(shape)
        dequantize_into(restored, values, scales)
        torch.testing.assert_close(restored, q.dequantize(), **exactly)


def test_a_power_of_two_maps_the_largest_value_of_a_block_to_240_up_to_448():
    weight = torch.zeros(130, 3 * 128)
    weight[0, 0], weight[1, 1] = 448.5, 7.0  # 224.25 rounds to 224: written as 448
    weight[0, 128], weight[1, 129] = 480.0, 7.0
    weight[0, 256], weight[1, 257] = -448.0, 7.0
    values, scales = quantize_blocks(weight, scale="po2")
    assert scales[0].tolist() == [1.0, 2.0, 1.0]
    assert values[0, [0, 128, 256]].tolist() == [448, 240, -448]
    assert values[1, [1, 129, 257]].tolist() == [7, 3.5, 7]
    assert scales[1].tolist() == [2.0**-48] * 3  # nothing in them


@pytest.mark.parametrize("scale", KINDS)
def test_a_config_names_the_kind_of_its_scales(model, tmp_path, scale):
    save_hf(model, tmp_path, fp8=True, scale=scale)
    config = json.loads((tmp_path / "config.json").read_text())
    named = {"scale_fmt": "ue8m0"} if scale == "po2" else {}
    assert config["quantization_config"] == named | {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    stored = load_file(tmp_path / "model.safetensors")
    scales = [t for name, t in stored.items() if name.endswith("_scale_inv")]
    assert {t.dtype for t in scales} == {torch.float32}
    mantissas = torch.cat([torch.frexp(t.flatten()).mantissa for t in scales])
    assert (mantissas == 0.5).all() == (scale == "po2")


@pytest.mark.parametrize("found", ["fp32", "UE8M0", ["ue8m0"]], ids=str)
def test_other_names_of_scales_are_refused(model, tmp_path, edit_config, found):
    save_hf(model, tmp_path, fp8=True)
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "scale_fmt": found,
    }
    edit_config(quantization_config=quantization)
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    assert str(error.value) == (
        "scale_fmt must be 'ue8m0', 'float' or left out, as in DeepSeek's FP8 "
        f"releases; got {found!r} in {tmp_path / 'config.json'}. Take the original "
        "release, or one in BF16."
    )


@pytest.mark.parametrize("found", [None, "float"])
def test_names_that_transformers_gives_scales_are_read(
    model, tmp_path, edit_config, found
):
    save_hf(model, tmp_path, fp8=True)
    before = load_hf(tmp_path).state_dict()
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_config(quantization_config=quantization | {"scale_fmt": found})
    after = load_hf(tmp_path).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_scales_are_taken_as_they_are_also_where_powers_of_two_are_announced(
    model, tmp_path, edit
):
    save_hf(model, tmp_path, fp8=True, scale="po2")
    name = "model.layers.0.self_attn.o_proj.weight"
    values = load_file(tmp_path / "model.safetensors")[name]
    edit(lambda stored: stored[name + "_scale_inv"].fill_(0.3))
    loaded = load_hf(tmp_path, dtype=torch.float32)
    expected = values.float() * torch.tensor(0.3)
    assert torch.equal(loaded.layers[0].attn.wo.weight, expected)


@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scale", KINDS)
def test_weights_that_are_not_finite_are_refused_and_files_stay(
    model, tmp_path, scale, fault
):
    save_hf(model, tmp_path, fp8=True, scale=scale)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    diverged = load_hf(tmp_path)
    with torch.no_grad():
        diverged.layers[1].ffn.experts.w2[0, 5, :2] = fault
    with pytest.raises(ValueError) as error:
        save_hf(diverged, tmp_path, fp8=True, scale=scale)
    assert str(error.value) == (
        "weights must be finite to be stored in FP8, where one that is not ruins its "
        f"block; {EXPERT} holds 2 infinities or NaN. Save an earlier state of the "
        "model, or set fp8=False to keep these."
    )
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fp8": True, "scale": "ue8m0"},
            "scale must be one of 'fp32', 'po2'; got 'ue8m0'. Set scale='fp32' or "
            "another of these.",
        ),
        (
            {"scale": "po2"},
            "scale='po2' is of FP8 blocks; without fp8=True there are none. Set "
            "fp8=True, or leave scale out.",
        ),
    ],
    ids=["unknown", "no blocks"],
)
def test_scales_that_are_not_written_are_refused(model, tmp_path, options, message):
    with pytest.raises(ValueError) as error:
        save_hf(model, tmp_path / "new", **options)
    assert str(error.value) == message
    assert not (tmp_path / "new").exists()
