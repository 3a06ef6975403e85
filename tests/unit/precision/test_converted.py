"""Converted models as they run: loss, gradients, bytes, files, and the way back."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from labkit.config import PRESETS, MLAConfig
from labkit.memory import apply_recompute
from labkit.model import Transformer, generate, load_hf, save_hf
from labkit.precision.convert import convert
from labkit.precision.linear import InFp8

TINY = PRESETS["tiny"]

V3_SHAPED = replace(
    TINY,
    n_layers=2,
    n_dense_layers=1,
    inter_dim=256,
    attention=MLAConfig(
        n_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    moe=replace(
        TINY.moe,
        n_routed_experts=4,
        n_expert_groups=2,
        n_limited_groups=1,
        moe_inter_dim=128,
    ),
)
"""Every part of DeepSeek-V3, no side of a matrix below 128."""


@pytest.fixture
def model() -> Transformer:
    return Transformer(V3_SHAPED, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(V3_SHAPED.vocab_size, (2, 65), generator=generator)


def loss_of(model: Transformer, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.loss(tokens[:, :-1], tokens[:, 1:]).total


@pytest.mark.parametrize("way", ["undo", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_conversion_changes_no_weight_and_can_be_taken_back(
    model, tokens, way, recompute
):
    apply_recompute(model, recompute)
    kinds, loss = [*map(type, model.modules())], loss_of(model, tokens)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    conversion = convert(model, "aggressive")
    assert loss_of(model, tokens) != loss
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    conversion.undo() if way == "undo" else convert(model, "bf16")
    assert [*map(type, model.modules())] == kinds
    assert torch.equal(loss_of(model, tokens), loss)


@pytest.fixture
def saved(tokens, kept_bytes) -> Callable[[Transformer], int]:
    """Return a function: what autograd keeps of a loss, besides parameters."""

    def count(model: Transformer) -> int:
        known = list(model.parameters())
        return kept_bytes(lambda _: loss_of(model, tokens), torch.zeros(1), *known)

    return count


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_saved_bytes_fall_against_bf16(model, saved, recompute):
    apply_recompute(model, recompute)
    in_bf16 = saved(model)
    convert(model)
    # Autocast keeps copies of weights in BF16, of which FP8 layers need none.
    assert saved(model) < 0.65 * in_bf16


def test_blocks_that_run_again_as_a_whole_keep_what_they_kept(model, saved):
    apply_recompute(model, "full")
    in_bf16 = saved(model)
    convert(model)
    assert saved(model) == in_bf16


def test_what_runs_again_costs_no_copy_in_fp8(model, saved):
    apply_recompute(model, "selective")
    convert(model)
    by_rule = saved(model)
    for part in model.modules():
        if isinstance(part, InFp8) and part.recipe.kept == "bf16":
            part.recipe = replace(part.recipe, kept="e4m3")
    # Results of two norms in each of two layers, and in MTP's, of one token less.
    n_rows = 2 * 2 * (2 * 64 + 63)
    assert saved(model) - by_rule == n_rows * (V3_SHAPED.dim + 1)


@pytest.mark.parametrize("policy", ["deepseek-v3", "aggressive", "article-1"])
def test_the_loss_is_that_of_bf16_to_a_thousandth(model, tokens, policy):
    expected = loss_of(model, tokens).item()
    convert(model, policy)
    loss = loss_of(model, tokens).item()
    assert loss != expected
    assert loss == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_gradients_reach_every_parameter_and_are_near_those_of_bf16(
    model, tokens, sqnr, recompute
):
    apply_recompute(model, recompute)

    # Three of these 128 tokens visit another expert, which its weights see in full.
    def floor(name: str) -> float:
        return 8 if ".gate." in name or ".experts." in name else 14

    exact = torch.autograd.grad(loss_of(model, tokens), list(model.parameters()))
    convert(model)
    loss_of(model, tokens).backward()
    for (name, parameter), wanted in zip(model.named_parameters(), exact, strict=True):
        assert sqnr(wanted, parameter.grad) > floor(name), name


def test_training_lowers_the_loss_about_as_bf16_does(model, tokens):
    def train(model: Transformer) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            loss = loss_of(model, tokens[:1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    twin = copy.deepcopy(model)
    convert(model)
    in_fp8, in_bf16 = train(model), train(twin)
    assert in_fp8[-1] < 0.95 * in_fp8[0]
    assert in_fp8[-1] == pytest.approx(in_bf16[-1], rel=0.01)


def test_a_converted_model_is_saved_and_loaded_as_a_plain_one(model, tmp_path):
    save_hf(model, tmp_path / "plain")
    convert(model)
    save_hf(model, tmp_path / "fp8")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "fp8").iterdir()) == files
    for name in files:
        plain, fp8 = (tmp_path / kind / name for kind in ("plain", "fp8"))
        assert fp8.read_bytes() == plain.read_bytes()
    loaded = load_hf(tmp_path / "fp8")
    assert not any(isinstance(module, InFp8) for module in loaded.modules())
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x)


def test_a_state_dict_goes_from_a_plain_model_into_a_converted_one(model, tokens):
    other = Transformer(V3_SHAPED, generator=torch.Generator().manual_seed(5))
    for each in (model, other):
        convert(each)
    wanted = loss_of(model, tokens)
    assert loss_of(other, tokens) != wanted
    plain = {name: x.clone() for name, x in model.state_dict().items()}
    other.load_state_dict(plain)
    assert torch.equal(loss_of(other, tokens), wanted)


def test_a_converted_model_generates_what_it_finds_likeliest(model, tokens):
    prompt = tokens[:, :8]
    plain = generate(model, prompt, 4).tokens
    convert(model)
    made = generate(model, prompt, 4).tokens
    assert not torch.equal(made, plain)
    with torch.no_grad():
        logits = model(torch.cat((prompt, made), dim=1))[:, 7:-1]
    chosen = logits.gather(-1, made.unsqueeze(-1)).squeeze(-1)
    # With a cache, attention reads `wkv_b` in high precision, and entries in BF16.
    assert (logits.amax(-1) - chosen).max() < 0.1 * logits.std()
