"""FP8 blocks: against values worked out by hand, and E4M3 decoded bit by bit."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from labkit.config import PRESETS, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from labkit.model import Transformer, load_hf, save_hf
from labkit.model.checkpoint_fp8 import (
    dequantize_into,
    is_quantized,
    quantize_blocks,
    scale_shape,
)
from labkit.model.checkpoint_names import places, shared_copies

# Wide enough that every kind of matrix has more than one block, and a tail.
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


def random_model(cfg=CONFIG):
    model = Transformer(cfg, generator=torch.Generator().manual_seed(1))
    for router in model.routers():
        router.bias.uniform_(-3, 3)
    return model


def decode(byte: int) -> float:
    """Return the E4M3 value of a byte: sign, four bits of exponent, three more."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    assert byte & 127 != 127, "NaN"
    if exponent == 0:
        magnitude = mantissa / 8 * 2.0**-6
    else:
        magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


def decoded(values):
    flat = values.view(torch.uint8).flatten().tolist()
    return torch.tensor([decode(byte) for byte in flat]).view(values.shape)


def test_a_block_is_scaled_so_that_its_largest_value_becomes_448():
    weight = torch.zeros(130, 257)
    weight[5, 5], weight[129, 3], weight[0, 256] = -896.0, 224.0, 112.0
    weight[6, 6] = 3.0
    values, scales = quantize_blocks(weight)
    nothing = (torch.tensor(1e-12) / 448).item()  # in three of the six blocks
    assert scales.tolist() == [[2.0, nothing, 0.25], [0.5, nothing, nothing]]
    assert values[5, 5] == -448 and values[129, 3] == 448 and values[0, 256] == 448
    assert values[6, 6] == 1.5


def test_dequantizing_multiplies_by_the_stored_scale():
    values = torch.ones(130, 257).to(torch.float8_e4m3fn)
    scales = torch.tensor([[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]])
    weight = torch.empty(130, 257)
    dequantize_into(weight, values, scales)
    corners = weight[[0, 127, 128, 129]][:, [0, 127, 128, 255, 256]]
    assert corners.tolist() == [[2, 2, 3, 3, 4]] * 2 + [[5, 5, 6, 6, 7]] * 2


@settings(max_examples=15)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    exponent=st.integers(-20, 20),
    seed=st.integers(0, 2**31),
)
def test_quantized_weights_are_the_nearest_of_all_e4m3_multiples(
    rows, columns, exponent, seed
):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    values, scales = quantize_blocks(weight)
    restored = torch.empty_like(weight)
    dequantize_into(restored, values, scales)

    grid = torch.tensor([decode(byte) for byte in range(127)])
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            block = slice(row, row + 128), slice(column, column + 128)
            scale = weight[block].abs().max() / 448
            assert torch.allclose(scale, scales[row // 128, column // 128])
            error = (restored[block] - weight[block]).abs()
            wanted = (weight[block].abs().flatten()[:50, None] / scale - grid).abs()
            best = wanted.min(dim=1).values * scale
            torch.testing.assert_close(
                error.flatten()[:50], best, rtol=1e-3, atol=1e-5 * scale.item()
            )


def test_a_loaded_fp8_model_is_the_stored_values_times_the_stored_scales(tmp_path):
    save_hf(random_model(), tmp_path, fp8=True)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    expected, scales = decoded(stored[name]), stored[name + "_scale_inv"]
    assert expected.shape == (140, 136)
    for i, rows in enumerate((slice(0, 128), slice(128, 140))):
        for j, columns in enumerate((slice(0, 128), slice(128, 136))):
            expected[rows, columns] *= scales[i, j]

    model = load_hf(tmp_path, dtype=torch.float32)

    assert torch.equal(model.layers[1].ffn.experts.w13[2, 140:], expected)


def test_an_fp8_file_stores_what_deepseek_stores_in_fp8_and_the_rest_in_bf16(tmp_path):
    save_hf(random_model(), tmp_path, fp8=True)
    stored = load_file(tmp_path / "model.safetensors")
    by_dtype = {}
    for name, tensor in stored.items():
        by_dtype.setdefault(tensor.dtype, set()).add(name)
    fp8, bf16, fp32 = (
        by_dtype[dtype]
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
    )
    assert by_dtype.keys() == {torch.float8_e4m3fn, torch.bfloat16, torch.float32}
    biases = {name for name in stored if name.endswith("e_score_correction_bias")}
    assert fp32 == {name + "_scale_inv" for name in fp8} | biases
    assert {name.rsplit(".", 2)[-2] for name in fp8} == {
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    matrices = {name for name in bf16 if stored[name].dim() == 2}
    assert {name.rsplit(".", 2)[-2] for name in matrices} == {
        *("embed_tokens", "lm_head", "head", "gate", "eh_proj")
    }


def test_scales_have_one_value_per_block_tails_included(tmp_path):
    save_hf(random_model(), tmp_path, fp8=True)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0."
    assert stored[f"{layer}mlp.gate_proj.weight_scale_inv"].shape == (3, 2)
    assert stored[f"{layer}self_attn.kv_b_proj.weight_scale_inv"].shape == (3, 2)
    assert scale_shape((128, 129)) == (1, 2)


def test_the_v3_checkpoint_has_its_published_size():
    model = Transformer(PRESETS["v3-671b"], device="meta")
    weights, found = model.state_dict(), places(model)
    found |= {copy: found[name] for copy, name in shared_copies(model.cfg).items()}
    n_values = n_bytes = 0
    for name, place in found.items():
        shape = place.within(weights).shape
        width = 4 if name.endswith("e_score_correction_bias") else 2
        if is_quantized(name, shape):
            width, n_scales = 1, math.prod(scale_shape(shape))
            n_values, n_bytes = n_values + n_scales, n_bytes + 4 * n_scales
        n_values += math.prod(shape)
        n_bytes += width * math.prod(shape)
    assert n_values == 684_531_386_000
    # A published page measures 641.30.
    assert round(n_bytes / 2**30, 2) == 641.29


def test_config_json_announces_fp8_as_deepseek_does(tmp_path):
    save_hf(random_model(), tmp_path, fp8=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }


def test_biases_pass_through_an_fp8_file_unrounded(tmp_path):
    model = random_model()
    save_hf(model, tmp_path, fp8=True)
    loaded = load_hf(tmp_path)
    assert loaded.embed.weight.dtype == torch.bfloat16
    for before, after in zip(model.routers(), loaded.routers(), strict=True):
        assert torch.equal(before.bias, after.bias)


def test_logits_of_an_fp8_copy_stay_near(tmp_path):
    model = random_model()
    save_hf(model, tmp_path, fp8=True)
    tokens = torch.arange(20)[None]
    exact = model(tokens)
    near = load_hf(tmp_path, dtype=torch.float32)(tokens)
    assert (near - exact).norm() < 0.1 * exact.norm()
    assert not torch.equal(near, exact)


PROJECTION = "model.layers.0.self_attn.o_proj.weight"
SCALES = PROJECTION + "_scale_inv"


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16])
def test_scales_of_one_or_two_bytes_are_read(tmp_path, edit, dtype):
    save_hf(random_model(), tmp_path, fp8=True)
    values = load_file(tmp_path / "model.safetensors")[PROJECTION]
    edit(lambda stored: stored.update({SCALES: torch.full((2, 2), 0.25).to(dtype)}))
    loaded = load_hf(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.layers[0].attn.wo.weight, values.float() * 0.25)


@pytest.mark.parametrize(
    ("name", "tensor", "fault"),
    [
        (SCALES, None, f"1 missing: {SCALES}"),
        (SCALES, torch.ones(3, 2), f"{SCALES} (3, 2) instead of (2, 2)"),
        (SCALES, torch.ones(2, 2, dtype=torch.int32), f"{SCALES} I32"),
        (
            PROJECTION,
            torch.zeros(136, 140).to(torch.float8_e5m2),
            f"1 of a dtype that is not read here: {PROJECTION} F8_E5M2",
        ),
        (
            "model.norm.weight",
            torch.zeros(136).to(torch.float8_e4m3fn),
            "1 of a dtype that is not read here: model.norm.weight F8_E4M3",
        ),
    ],
    ids=["no scales", "wrong scales", "whole scales", "E5M2", "a vector"],
)
def test_fp8_that_cannot_be_read_is_named(tmp_path, edit, name, tensor, fault):
    save_hf(random_model(), tmp_path, fp8=True)
    edit(lambda t: t.pop(name) if tensor is None else t.update({name: tensor}))
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    assert fault in str(error.value)


def test_an_embedding_in_fp8_makes_a_bf16_model(tmp_path, edit):
    model = random_model(replace(CONFIG, mtp=None))
    save_hf(model, tmp_path, fp8=True)
    name = "model.embed_tokens.weight"
    values, scales = quantize_blocks(model.embed.weight.detach())
    edit(lambda stored: stored.update({name: values, name + "_scale_inv": scales}))
    loaded = load_hf(tmp_path)
    expected = torch.empty(20, 136, dtype=torch.bfloat16)
    dequantize_into(expected, values, scales)
    assert torch.equal(loaded.embed.weight, expected)


def test_copies_in_fp8_are_compared_with_what_they_copy(tmp_path, edit):
    save_hf(random_model(), tmp_path, fp8=True)
    copy = "model.layers.2.embed_tokens.weight"
    edit(lambda t: t.update({copy: t[copy].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match=f"1 unlike the shared weight: {copy}"):
        load_hf(tmp_path)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantization", "key", "wanted"),
    [
        (FP8 | {"quant_method": "awq"}, "quant_method", "'fp8'; got 'awq'"),
        (FP8 | {"fmt": "e5m2"}, "fmt", "'e4m3'; got 'e5m2'"),
        (
            FP8 | {"weight_block_size": [64, 64]},
            "weight_block_size",
            "[128, 128]; got [64, 64]",
        ),
        ({}, "quant_method", "'fp8'; got None"),
        (["fp8"], "quant_method", "'fp8'; got ['fp8']"),
    ],
)
def test_other_quantizations_are_refused_with_the_remedy(
    tmp_path, edit_config, quantization, key, wanted
):
    save_hf(random_model(), tmp_path, fp8=True)
    edit_config(quantization_config=quantization)
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    rule, got = wanted.split("; ")
    assert str(error.value) == (
        f"{key} must be {rule}, as in DeepSeek's FP8 releases; {got} in "
        f"{tmp_path / 'config.json'}. Take the original release, or one in BF16."
    )


def test_a_config_that_leaves_out_the_format_means_e4m3(tmp_path, edit_config):
    save_hf(random_model(), tmp_path, fp8=True)
    edit_config(quantization_config={k: v for k, v in FP8.items() if k != "fmt"})
    assert load_hf(tmp_path).cfg == CONFIG


def test_gates_and_vectors_are_not_quantized():
    assert not is_quantized("model.layers.3.mlp.gate.weight", (256, 7168))
    assert not is_quantized("model.layers.61.eh_proj.weight", (7168, 14336))
    assert not is_quantized("model.norm.weight", (7168,))
    assert is_quantized("model.layers.0.mlp.gate_proj.weight", (18432, 7168))
