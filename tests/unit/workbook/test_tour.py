"""What the model tour counts and compares, against files and hand-made numbers."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from labkit.config import PRESETS
from labkit.model import Transformer, save_hf
from labkit.workbook import tour

TINY, V3 = PRESETS["tiny"], PRESETS["v3-671b"]
BY_PRESET = pytest.mark.parametrize("cfg", PRESETS.values(), ids=PRESETS)


@pytest.fixture(scope="module")
def tiny():
    model = Transformer(TINY, generator=torch.Generator().manual_seed(0))
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def giant():
    return Transformer(V3, device="meta")


@BY_PRESET
def test_the_parts_sum_to_the_model(cfg):
    assert sum(tour.stored_parts(cfg).values()) == cfg.n_params()
    assert sum(tour.active_parts(cfg).values()) == cfg.n_active_params()


def test_a_dense_model_is_active_but_for_its_embedding():
    dense = replace(TINY, moe=None)
    stored, active = tour.stored_parts(dense), tour.active_parts(dense)

    assert active == stored | {"embedding": 0}


def test_a_size_includes_the_routers_biases(tiny):
    assert tour.size(tiny) == TINY.n_params(include_mtp=True)
    assert tour.size(tiny.layers[1].ffn.gate) == 8 * 128 + 8


def test_a_token_leaves_a_row_for_each_matrix_and_norm_it_passes(tiny):
    x, turns = torch.zeros(1, 1, 128), tiny.turns(torch.arange(1))
    rows = tour.trace(tiny.layers[0].attn, x, turns)

    assert [(row["step"], row["reads"], row["writes"]) for row in rows] == [
        ("wq_a", 128, 48),
        ("q_norm", 48, 48),
        ("wq_b", 48, 4 * (32 + 16)),
        ("wkv_a", 128, 32 + 16),
        ("kv_norm", 32, 32),
        ("wkv_b", 32, 4 * (32 + 32)),
        ("wo", 4 * 32, 128),
    ]
    assert sum(row["parameters"] for row in rows) == tour.size(tiny.layers[0].attn)


def test_no_hook_stays_behind_even_after_an_error(tiny):
    attn = tiny.layers[0].attn
    with pytest.raises(TypeError):
        tour.trace(attn)

    assert not any(part._forward_hooks for part in attn.modules())


def test_the_parts_of_a_file_are_what_save_hf_writes(tiny, tmp_path):
    save_hf(tiny, tmp_path, fp8=True)
    written = {"F8_E4M3": 0, "F32": 0, "BF16": 0}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, the file is no mapping
            tensor = file.get_tensor(name)
            kind = file.get_slice(name).get_dtype()
            written[kind] += tensor.numel() * tensor.element_size()
    parts = tour.file_parts(tiny)

    assert parts["FP8 values"] == written["F8_E4M3"]
    assert parts["BF16"] == written["BF16"]
    assert parts["FP32 scales"] + parts["FP32 biases"] == written["F32"]


def test_the_files_of_v3_have_the_published_size(giant):
    parts = tour.file_parts(giant)
    n_elements = (
        parts["FP8 values"]
        + parts["FP32 scales"] // 4
        + parts["BF16"] // 2
        + parts["FP32 biases"] // 4
    )

    assert round(sum(parts.values()) / 1e9, 2) == 688.57
    assert round(sum(parts.values()) / 2**30, 2) == 641.29
    assert n_elements == 684_531_386_000


def test_randomising_leaves_no_gain_of_one_and_no_bias_of_zero():
    model = Transformer(TINY)
    tour.randomise(model, seed=0)
    again = Transformer(TINY)
    tour.randomise(again, seed=0)

    assert (model.norm.weight != 1).all()
    assert (model.layers[1].ffn.gate.bias != 0).all()
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_a_model_is_judged_as_it_is_and_with_each_fault(tiny):
    tokens = torch.arange(12).reshape(1, 12)
    faults = {
        "as it is": lambda model: None,
        "no head": lambda m: m.head.weight.zero_(),
    }
    rows = tour.judge(tiny, tokens, tiny(tokens), faults)

    assert [row["our model"] for row in rows] == ["as it is", "no head"]
    assert rows[0]["largest difference of a logit"] == "below 1e-4"
    assert rows[0]["same next token"] == "12 of 12"
    assert float(rows[1]["largest difference of a logit"]) > 1e-2
    assert tiny.head.weight.any()


def test_without_transformers_the_table_says_how_to_get_it():
    tokens = torch.zeros(1, 1, dtype=torch.int64)

    assert tour.judge(None, tokens, None, {"as loaded": print}) == [
        {
            "our model": "not judged: transformers is missing; "
            "pip install -e '.[test]' brings it"
        }
    ]
