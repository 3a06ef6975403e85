"""Models in FP8: their names, attention layers, recomputation, and the way back."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from labkit.config import PRESETS, GQAConfig
from labkit.memory import apply_recompute
from labkit.model import Transformer
from labkit.model.attention import GQA, build_attention
from labkit.model.experts import Experts
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.model.rope import rope_frequencies, rotations
from labkit.precision.linear import Fp8Recipe, InFp8
from labkit.precision.transform import IN_FP8, to_fp8, to_high

KINDS = tuple(IN_FP8)
FEW = replace(
    PRESETS["tiny"].moe, n_routed_experts=4, n_expert_groups=2, n_limited_groups=1
)
SMALLEST = replace(PRESETS["tiny"], n_layers=2, n_dense_layers=1, moe=FEW)


def in_fp8(module: nn.Module) -> nn.Module:
    """Return a module with all in FP8 that can be, but for a model's head."""
    for name, part in list(module.named_modules()):
        if isinstance(part, KINDS) and name != "head":
            to_fp8(part)
    return module


def tiny() -> tuple[Transformer, torch.Tensor]:
    """Return a model and a batch of tokens."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(SMALLEST, generator=generator)
    return model, torch.randint(model.cfg.vocab_size, (2, 17), generator=generator)


def loss_of(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model.loss(tokens[:, :-1], tokens[:, 1:]).total


def test_a_model_in_fp8_keeps_its_names_and_weights_and_can_be_taken_back():
    model, tokens = tiny()
    names, plain = list(model.state_dict()), loss_of(model, tokens)
    kinds = [type(module) for module in model.modules()]
    loss = loss_of(in_fp8(model), tokens)
    loss.backward()
    assert list(model.state_dict()) == names
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert 0 < (loss - plain).abs() < 0.01 * plain
    for module in list(model.modules()):
        if isinstance(module, KINDS):
            to_high(module)
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(loss_of(model, tokens), plain)


@pytest.mark.parametrize(
    ("attention", "n_inputs"),
    [
        # wq_a and wkv_a read one tensor; wq_b, wkv_b and wo one each.
        (PRESETS["tiny"].attention, 4),
        # wq, wk and wv read one tensor; wo another.
        (GQAConfig(n_heads=4, n_kv_heads=2, head_dim=32), 2),
    ],
)
def test_an_attention_layer_keeps_each_input_once(kept, drawn, attention, n_inputs):
    cfg = replace(PRESETS["tiny"], attention=attention)
    attn = in_fp8(build_attention(cfg))
    turns = rotations(torch.arange(32), rope_frequencies(cfg))
    tensors = kept(lambda x: attn(x, turns), drawn(1, 32, cfg.dim))
    assert sum(t.dtype == torch.float8_e4m3fn for t in tensors) == n_inputs


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_what_is_run_again_is_the_same_in_fp8(policy):
    def run(policy: str) -> list[torch.Tensor]:
        model, tokens = tiny()
        in_fp8(apply_recompute(model, policy))
        loss_of(model, tokens).backward()
        return [p.grad for p in model.parameters()]

    for again, kept in zip(run(policy), run("none"), strict=True):
        assert torch.equal(again, kept)


def test_a_policy_of_recomputation_comes_back_with_the_plain_class():
    model, _ = tiny()
    mlp = apply_recompute(model, "selective").layers[0].ffn
    kind = type(mlp)
    assert kind is not MLP
    to_fp8(mlp)
    assert isinstance(mlp, InFp8)
    to_high(mlp)
    assert type(mlp) is kind


def test_a_second_recipe_takes_the_place_of_the_first():
    experts = Experts(2, 128, 128)
    to_fp8(experts)
    to_fp8(experts, Fp8Recipe(backend="fp22"))
    assert experts.backend.name == "fp22"
    to_high(experts)
    assert type(experts) is Experts


def test_shapes_alone_pass_through_a_model_in_fp8():
    model = in_fp8(Transformer(SMALLEST, device="meta"))
    tokens = torch.empty(2, 17, dtype=torch.long, device="meta")
    loss_of(model, tokens).backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_other_modules_are_refused():
    message = (
        "module must be a Linear, an MLP or Experts of labkit's model; got a GQA. Pass "
        "the layers in it one by one."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        to_fp8(GQA.__new__(GQA))
    assert isinstance(Linear(1, 1), KINDS)
