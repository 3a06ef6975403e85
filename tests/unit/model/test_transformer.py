"""The whole model: sizes, initial weights, causality, casts, and 671B on paper."""

import copy
import time
from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS, GQAConfig, MTPConfig
from labkit.model import LatentCache, Transformer
from labkit.model.moe import MoE
from labkit.model.rope import rope_frequencies

TINY = PRESETS["tiny"]
VARIANTS = {
    "tiny": TINY,
    "dense": replace(TINY, moe=None),
    "gqa": replace(TINY, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=16)),
    "mha": replace(TINY, attention=GQAConfig(n_heads=4, n_kv_heads=4, head_dim=16)),
    "no query rank": replace(TINY, attention=replace(TINY.attention, q_lora_rank=None)),
    "two MTP modules": replace(TINY, mtp=MTPConfig(depth=2)),
    "only experts": replace(TINY, n_dense_layers=0),
    "only dense layers": replace(TINY, n_dense_layers=4),
    "V2": replace(
        TINY,
        mtp=None,
        moe=replace(TINY.moe, score_func="softmax", group_score="max", has_bias=False),
    ),
}


def built(cfg=TINY, seed=0, **options):
    return Transformer(cfg, generator=torch.Generator().manual_seed(seed), **options)


def count(model):
    """Return the numbers in a model: parameters, and biases, which are buffers."""
    return sum(tensor.numel() for tensor in model.state_dict().values())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_formula_counts_what_is_built(name):
    cfg = VARIANTS[name]
    assert count(Transformer(cfg, device="meta")) == cfg.n_params(include_mtp=True)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("v2-lite-16b", 15_706_484_224),
        ("v2-236b", 235_741_434_880),
        ("v3-671b", 671_026_419_200),
    ],
)
def test_published_models_have_their_published_size(name, total):
    cfg = replace(PRESETS[name], mtp=None)
    assert count(Transformer(cfg, device="meta")) == cfg.n_params() == total


def test_671b_with_mtp_is_built_on_meta_within_20_seconds():
    cfg = PRESETS["v3-671b"]
    start = time.monotonic()
    model = Transformer(cfg, device="meta")
    assert time.monotonic() - start < 20
    assert (
        count(model)
        == cfg.n_params(include_mtp=True)
        == 671_026_419_200 + 11_610_068_224
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_parameters_have_the_names_that_the_rest_relies_on():
    names = Transformer(TINY, device="meta").state_dict().keys()
    attention = {"wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "q_norm", "kv_norm"}
    block = {f"attn.{part}.weight" for part in attention}
    block |= {"attn_norm.weight", "ffn_norm.weight"}
    dense = {f"ffn.{part}.weight" for part in ("w1", "w2", "w3")}
    sparse = {f"ffn.shared_experts.{part}.weight" for part in ("w1", "w2", "w3")}
    sparse |= {"ffn.gate.weight", "ffn.gate.bias", "ffn.experts.w13", "ffn.experts.w2"}
    expected = {"embed.weight", "norm.weight", "head.weight"}
    expected |= {f"layers.0.{name}" for name in block | dense}
    expected |= {f"layers.{i}.{name}" for i in (1, 2, 3) for name in block | sparse}
    expected |= {f"mtp.0.block.{name}" for name in block | sparse}
    expected |= {f"mtp.0.{p}.weight" for p in ("enorm", "hnorm", "eh_proj", "norm")}
    assert names == expected


def test_stacked_experts_have_gate_and_up_rows_in_one_matrix():
    experts = Transformer(TINY, device="meta").layers[1].ffn.experts
    assert experts.w13.shape == (8, 2 * 96, 128)
    assert experts.w2.shape == (8, 128, 96)


def test_the_first_layers_are_dense():
    model = Transformer(replace(TINY, n_dense_layers=2), device="meta")
    assert [isinstance(layer.ffn, MoE) for layer in model.layers] == [0, 0, 1, 1]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_later_token_changes_no_earlier_logits(name):
    model = built(VARIANTS[name])
    tokens = torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (tokens[:, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_a_prefix_has_the_logits_it_has_alone():
    model = built()
    tokens = torch.randint(0, 256, (1, 12))
    torch.testing.assert_close(model(tokens)[:, :5], model(tokens[:, :5]))


def test_sequences_of_a_batch_do_not_see_each_other():
    model = built()
    tokens = torch.randint(0, 256, (3, 9))
    together = model(tokens)
    for i in range(3):
        torch.testing.assert_close(together[i : i + 1], model(tokens[i : i + 1]))


def test_order_of_tokens_matters():
    model = built(replace(TINY, init_std=0.2))
    forth = model(torch.tensor([[1, 2, 3]]))[:, -1]
    back = model(torch.tensor([[2, 1, 3]]))[:, -1]
    assert not torch.allclose(forth, back)


def test_the_same_generator_gives_the_same_model():
    first, again, other = built(seed=1), built(seed=1), built(seed=2)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert not torch.equal(first.head.weight, other.head.weight)
    tokens = torch.randint(0, 256, (1, 9))
    assert torch.equal(first(tokens), again(tokens))


def test_initial_weights_leave_the_global_random_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    built()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("std", [0.006, 0.1])
def test_initial_weights_have_the_configs_spread_and_gains_are_1(std):
    model = built(replace(TINY, init_std=std))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        else:
            n_values = parameter.numel()
            assert parameter.std().item() == pytest.approx(std, rel=5 / n_values**0.5)
            assert abs(parameter.mean().item()) < 5 * std / n_values**0.5, name
    assert all((router.bias == 0).all() for router in model.routers())


def test_weights_may_be_drawn_anew():
    model = built(seed=1)
    for router in model.routers():
        router.bias.fill_(3)
    model.reset_parameters(torch.Generator().manual_seed(2))
    for name, tensor in built(seed=2).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_parameters_take_the_dtype_asked_for_and_biases_stay_fp32():
    model = built(dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {router.bias.dtype for router in model.routers()} == {torch.float32}


def test_casting_to_bf16_rounds_neither_biases_nor_frequencies():
    model = built(replace(TINY, max_seq_len=1024))
    for router in model.routers():
        router.bias.uniform_(-1, 1)
    biases = [router.bias.clone() for router in model.routers()]
    turns = model.turns(torch.arange(1000))
    model.bfloat16()
    assert model.head.weight.dtype == torch.bfloat16
    for router, bias in zip(model.routers(), biases, strict=True):
        assert torch.equal(router.bias, bias)
    assert torch.equal(model.turns(torch.arange(1000)), turns)
    assert not torch.equal(rope_frequencies(TINY), rope_frequencies(model.cfg))


def test_a_dense_model_in_bf16_stays_near_its_fp32_twin():
    # Dense, because rounding sends a few tokens to other experts.
    model = built(replace(TINY, moe=None, init_std=0.05))
    low = copy.deepcopy(model).bfloat16()
    tokens = torch.randint(0, 256, (2, 20))
    exact, near = model(tokens), low(tokens)
    assert near.dtype == torch.bfloat16
    assert (near - exact).norm() < 0.02 * exact.norm()


def test_a_meta_model_is_given_storage_and_weights_later():
    model = Transformer(TINY, device="meta").to_empty(device="cpu")
    model.reset_parameters(torch.Generator().manual_seed(0))
    for name, tensor in built().state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    tokens = torch.randint(0, 256, (1, 5))
    assert torch.equal(model(tokens), built()(tokens))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_on_meta_has_the_shapes_of_a_real_one(name):
    cfg = VARIANTS[name]
    model, tokens = Transformer(cfg, device="meta"), torch.randint(0, 256, (2, 12))
    parts = []
    for twin in (model, built(cfg)):
        x = tokens.to(twin.head.weight.device)
        assert twin(x).shape == (2, 12, 256)
        parts.append(twin.loss(x, x))
        parts[-1].total.backward()
    for part in ("total", "main", "mtp", "balance", "load"):
        on_meta, real = (getattr(loss, part) for loss in parts)
        assert (on_meta.shape, on_meta.dtype) == (real.shape, real.dtype)
        assert on_meta.is_meta
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_a_token_is_decoded_on_meta():
    model = Transformer(TINY, device="meta")
    cache = LatentCache(TINY, 1, 4, device="meta", dtype=torch.float32)
    with torch.inference_mode():
        for _ in range(2):
            token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
            assert model(token, cache).shape == (1, 1, 256)


def test_a_copy_computes_alone():
    model = built()
    twin = copy.deepcopy(model)
    tokens = torch.randint(0, 256, (1, 5))
    assert torch.equal(model(tokens), twin(tokens))
    with torch.no_grad():
        twin.head.weight.zero_()
    assert (twin(tokens) == 0).all()
    assert (model(tokens) != 0).any()


def test_routers_are_listed_in_the_order_of_their_layers_mtp_last():
    model = Transformer(replace(TINY, mtp=MTPConfig(depth=2)), device="meta")
    expected = [layer.ffn.gate for layer in model.layers[1:]]
    expected += [module.block.ffn.gate for module in model.mtp]
    assert len(model.routers()) == len(expected)
    for found, router in zip(model.routers(), expected, strict=True):
        assert found is router
