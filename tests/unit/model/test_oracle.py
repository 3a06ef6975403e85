"""transformers' DeepSeek-V3 and V2 as the judge of logits, loss and gradients.

Each example is a config drawn by hypothesis, with random weights, norm gains and router
biases, that transformers saves and `load_hf` reads; and the other way round.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from labkit.model import Transformer, load_hf, save_hf
from labkit.model.moe import MoE

RTOL, ATOL = 1e-4, 1e-5
SCALE = 0.5
"""Weights' size, in 1/√width. At 1, FP32 itself is now and then off by more than the
tolerance: transformers' logits differ by 3e-5 from its own in double precision."""
NEAR_TIE = 1e-6
"""Scores nearer than this may be ranked differently by two correct programs."""

VERSIONS = {
    "v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
drawn = settings(
    max_examples=10,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# Without shared experts, transformers makes matrices of width 0.
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


@st.composite
def rope_settings(draw, has_yarn):
    theta = draw(st.sampled_from([500.0, 10_000.0]))
    if not has_yarn:
        return {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    original = draw(st.integers(8, 64))
    factor = draw(st.sampled_from([1.5, 4.0, 40.0]))
    mscale, mscale_all_dim = draw(
        st.sampled_from([(1.0, 1.0), (0.707, 0.707), (0.8, 1.2), (1.0, 0.0)])
    )
    return {
        "max_position_embeddings": int(original * factor),
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": draw(st.sampled_from([4.0, 32.0])),
            "beta_slow": 1.0,
            "mscale": mscale,
            "mscale_all_dim": mscale_all_dim,
        },
    }


@st.composite
def expert_settings(draw, version):
    n_groups = draw(st.sampled_from([1, 2, 3, 4, 8]))
    # transformers' V3 sums the best two of each group, and fails on a group of one.
    per_group = draw(st.integers(2 if version == "v3" else 1, 3))
    n_limited = draw(st.integers(1, n_groups))
    own = {
        "v3": {"norm_topk_prob": draw(st.booleans())},
        "v2": {"topk_method": "greedy" if n_groups == 1 else "group_limited_greedy"},
    }
    return own[version] | {
        "n_routed_experts": n_groups * per_group,
        "n_group": n_groups,
        "topk_group": n_limited,
        "num_experts_per_tok": draw(st.integers(1, min(4, n_limited * per_group))),
        "moe_intermediate_size": draw(st.integers(1, 9)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5, 16.0])),
    }


@st.composite
def hf_configs(draw, version, has_query_rank, has_yarn):
    n_layers, n_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    config_class, _ = VERSIONS[version]
    # transformers' V2 views rows as complex where they lie, and fails on odd widths.
    step = 2 if version == "v2" else 1
    return config_class(
        **draw(rope_settings(has_yarn)),
        **draw(expert_settings(version)),
        vocab_size=draw(st.integers(11, 40)),
        hidden_size=n_heads * draw(st.integers(3, 9)),  # V2 refuses other multiples
        intermediate_size=draw(st.integers(1, 20)),
        num_hidden_layers=n_layers,
        first_k_dense_replace=draw(st.integers(0, n_layers)),
        num_attention_heads=n_heads,
        num_key_value_heads=n_heads,
        q_lora_rank=draw(st.integers(2, 9)) if has_query_rank else None,
        kv_lora_rank=step * draw(st.integers(1, 9)),
        qk_nope_head_dim=step * draw(st.integers(1, 7)),
        qk_rope_head_dim=2 * draw(st.integers(1, 4)),
        v_head_dim=draw(st.integers(1, 9)),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
        num_nextn_predict_layers=0,
    )


def random_hf_model(version, config, seed):
    """Return transformers' model with weights that make every part count."""
    torch.manual_seed(seed)
    hf = as_reference(VERSIONS[version][1](config))
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.3, 1.7)
            else:
                parameter.normal_(std=SCALE * max(parameter.shape[-1], 1) ** -0.5)
        for name, buffer in hf.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-2, 1)
    return hf


def as_reference(hf):
    """Return the model with its plainest kernels, and one epsilon in all norms."""
    hf.set_attn_implementation("eager")
    hf.set_experts_implementation("eager")
    for layer in hf.model.layers:
        # transformers keeps these two at 1e-6, whatever rms_norm_eps says.
        layer.self_attn.kv_a_layernorm.variance_epsilon = hf.config.rms_norm_eps
        if hf.config.q_lora_rank is not None:
            layer.self_attn.q_a_layernorm.variance_epsilon = hf.config.rms_norm_eps
    return hf


def corresponding(
    hf: nn.Module, model: Transformer
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each weight of both models, by a mapping that owes nothing to labkit's."""
    yield "embedding", hf.model.embed_tokens.weight, model.embed.weight
    yield "final norm", hf.model.norm.weight, model.norm.weight
    yield "head", hf.lm_head.weight, model.head.weight
    for i, (theirs, ours) in enumerate(zip(hf.model.layers, model.layers, strict=True)):
        for name, a, b in layer_pairs(theirs, ours):
            yield f"layer {i}: {name}", a.weight if hasattr(a, "weight") else a, b


def layer_pairs(theirs, ours):
    yield "norm before attention", theirs.input_layernorm, ours.attn_norm.weight
    yield "norm before ffn", theirs.post_attention_layernorm, ours.ffn_norm.weight
    attention, mla = theirs.self_attn, ours.attn
    if attention.q_lora_rank is None:
        yield "query", attention.q_proj, mla.wq.weight
    else:
        yield "query down", attention.q_a_proj, mla.wq_a.weight
        yield "query norm", attention.q_a_layernorm, mla.q_norm.weight
        yield "query up", attention.q_b_proj, mla.wq_b.weight
    yield "latent", attention.kv_a_proj_with_mqa, mla.wkv_a.weight
    yield "latent norm", attention.kv_a_layernorm, mla.kv_norm.weight
    yield "latent up", attention.kv_b_proj, mla.wkv_b.weight
    yield "output", attention.o_proj, mla.wo.weight
    if isinstance(ours.ffn, MoE):
        yield "router", theirs.mlp.gate, ours.ffn.gate.weight
        yield "experts in", theirs.mlp.experts.gate_up_proj, ours.ffn.experts.w13
        yield "experts out", theirs.mlp.experts.down_proj, ours.ffn.experts.w2
        if ours.ffn.shared_experts is not None:
            yield from mlp_pairs(theirs.mlp.shared_experts, ours.ffn.shared_experts)
    else:
        yield from mlp_pairs(theirs.mlp, ours.ffn)


def mlp_pairs(theirs, ours):
    yield "gate", theirs.gate_proj, ours.w1.weight
    yield "up", theirs.up_proj, ours.w3.weight
    yield "down", theirs.down_proj, ours.w2.weight


def smallest_margin(model: Transformer, tokens: torch.Tensor) -> float:
    """Return how near any router came to another choice of groups or experts."""
    margins = [float("inf")]
    _, routings = model.hidden(tokens)
    for router, routing in zip(model.routers(), routings, strict=True):
        moe = router.moe
        score = routing.affinity.flatten(0, 1)
        score = score if router.bias is None else score + router.bias
        grouped = score.unflatten(-1, (moe.n_expert_groups, -1))
        n_best = 2 if moe.group_score == "top2" else 1
        groups = grouped.topk(min(n_best, grouped.shape[-1])).values.sum(-1)
        ranked = groups.sort(descending=True)
        if moe.n_limited_groups < moe.n_expert_groups:
            edge = ranked.values[:, moe.n_limited_groups - 1 : moe.n_limited_groups + 1]
            margins.append((edge[:, 0] - edge[:, 1]).min().item())
        open_groups = ranked.indices[:, : moe.n_limited_groups, None]
        open_groups = open_groups.expand(-1, -1, moe.experts_per_group)
        best = grouped.gather(1, open_groups).flatten(1).sort(descending=True).values
        edge = best[:, moe.n_activated_experts - 1 : moe.n_activated_experts + 1]
        if edge.shape[1] == 2:
            margins.append((edge[:, 0] - edge[:, 1]).min().item())
    return min(margins)


def draw_tokens(data, vocab_size):
    shape = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
    return torch.randint(0, vocab_size, shape)


def for_every_kind(test):
    """Draw configs for each version, with and without query rank and YaRN."""
    test = drawn(given(data=st.data(), seed=st.integers(0, 2**31))(test))
    test = pytest.mark.parametrize("has_yarn", [False, True])(test)
    test = pytest.mark.parametrize("has_query_rank", [False, True])(test)
    return pytest.mark.parametrize("version", VERSIONS)(test)


@for_every_kind
def test_logits_loss_and_every_gradient_agree(
    tmp_path, version, has_query_rank, has_yarn, data, seed
):
    config = data.draw(hf_configs(version, has_query_rank, has_yarn))
    hf = random_hf_model(version, config, seed)
    hf.save_pretrained(tmp_path)
    model = load_hf(tmp_path)
    tokens = draw_tokens(data, config.vocab_size)
    assume(smallest_margin(model, tokens) > NEAR_TIE)

    expected = hf(tokens, labels=tokens)
    torch.testing.assert_close(model(tokens), expected.logits, rtol=RTOL, atol=ATOL)

    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    loss = model.loss(tokens, targets, balance_weight=0.0)
    torch.testing.assert_close(loss.total, expected.loss, rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(loss.main, loss.total.detach())

    loss.total.backward()
    expected.loss.backward()
    pairs = list(corresponding(hf, model))
    assert len(pairs) == len(list(model.parameters()))
    for name, theirs, ours in pairs:
        torch.testing.assert_close(
            ours.grad,
            theirs.grad,
            rtol=RTOL,
            atol=ATOL,
            msg=lambda message, name=name: f"gradient of {name}: {message}",
        )


@for_every_kind
def test_transformers_reads_what_save_hf_writes(
    tmp_path, version, has_query_rank, has_yarn, data, seed
):
    config = data.draw(hf_configs(version, has_query_rank, has_yarn))
    random_hf_model(version, config, seed).save_pretrained(tmp_path / "theirs")
    model = load_hf(tmp_path / "theirs")
    tokens = draw_tokens(data, config.vocab_size)
    assume(smallest_margin(model, tokens) > NEAR_TIE)

    shard = data.draw(st.sampled_from([1, 5_000, 10**9]))
    save_hf(model, tmp_path / "ours", max_shard_bytes=shard)
    hf = as_reference(VERSIONS[version][1].from_pretrained(tmp_path / "ours"))

    torch.testing.assert_close(hf(tokens).logits, model(tokens), rtol=RTOL, atol=ATOL)
