"""transformers' DeepSeek-V3 and V2 as the judge of logits, loss and gradients.

Each example is a config drawn by hypothesis, with random weights, norm gains and router
biases, that transformers saves and `load_hf` reads; and the other way round.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)
from transformers.modeling_layers import MtpModel

from labkit.config import ModelConfig
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
        aux_loss_alpha=draw(st.sampled_from([0.0, 0.01])),
    )


@torch.no_grad()
def randomise(model):
    """Draw weights, norm gains and router biases that make every part count."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.3, 1.7)
        else:
            parameter.normal_(std=SCALE * max(parameter.shape[-1], 1) ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.uniform_(-2, 1)


def as_reference(hf):
    """Return transformers' model with its plainest kernels and one epsilon."""
    hf.set_attn_implementation("eager")
    hf.set_experts_implementation("eager")
    for layer in hf.model.layers:
        use_one_epsilon(layer, hf.config)
    return hf


def use_one_epsilon(layer, config):
    """Give a layer's two inner norms the config's epsilon; transformers has 1e-6."""
    layer.self_attn.kv_a_layernorm.variance_epsilon = config.rms_norm_eps
    if config.q_lora_rank is not None:
        layer.self_attn.q_a_layernorm.variance_epsilon = config.rms_norm_eps


def corresponding(
    hf: nn.Module, model: Transformer
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each weight of both models, by a mapping that owes nothing to labkit's."""
    yield "embedding", hf.model.embed_tokens.weight, model.embed.weight
    yield "final norm", hf.model.norm.weight, model.norm.weight
    yield "head", hf.lm_head.weight, model.head.weight
    for i, (theirs, ours) in enumerate(zip(hf.model.layers, model.layers, strict=True)):
        for name, a, b in layer_pairs(theirs, ours):
            yield f"layer {i}: {name}", a, b


def layer_pairs(theirs, ours):
    yield "input norm", theirs.input_layernorm.weight, ours.attn_norm.weight
    yield "middle norm", theirs.post_attention_layernorm.weight, ours.ffn_norm.weight
    attention, mla = theirs.self_attn, ours.attn
    if attention.q_lora_rank is None:
        yield "query", attention.q_proj.weight, mla.wq.weight
    else:
        yield "query down", attention.q_a_proj.weight, mla.wq_a.weight
        yield "query norm", attention.q_a_layernorm.weight, mla.q_norm.weight
        yield "query up", attention.q_b_proj.weight, mla.wq_b.weight
    yield "latent", attention.kv_a_proj_with_mqa.weight, mla.wkv_a.weight
    yield "latent norm", attention.kv_a_layernorm.weight, mla.kv_norm.weight
    yield "latent up", attention.kv_b_proj.weight, mla.wkv_b.weight
    yield "output", attention.o_proj.weight, mla.wo.weight
    if isinstance(ours.ffn, MoE):
        yield "router", theirs.mlp.gate.weight, ours.ffn.gate.weight
        yield "experts in", theirs.mlp.experts.gate_up_proj, ours.ffn.experts.w13
        yield "experts out", theirs.mlp.experts.down_proj, ours.ffn.experts.w2
        if ours.ffn.shared_experts is not None:
            yield from mlp_pairs(theirs.mlp.shared_experts, ours.ffn.shared_experts)
    else:
        yield from mlp_pairs(theirs.mlp, ours.ffn)


def mlp_pairs(theirs, ours):
    yield "gate", theirs.gate_proj.weight, ours.w1.weight
    yield "up", theirs.up_proj.weight, ours.w3.weight
    yield "down", theirs.down_proj.weight, ours.w2.weight


def mtp_pairs(theirs, ours):
    for i, (a, b) in enumerate(zip(theirs.layers, ours.mtp, strict=True)):
        yield f"mtp {i}: embedding norm", a.enorm.weight, b.enorm.weight
        yield f"mtp {i}: hidden norm", a.hnorm.weight, b.hnorm.weight
        yield f"mtp {i}: projection", a.eh_proj.weight, b.eh_proj.weight
        yield f"mtp {i}: last norm", a.post_norm.weight, b.norm.weight
        for name, x, y in layer_pairs(a.mtp_block, b.block):
            yield f"mtp {i}: {name}", x, y


def smallest_margin(model: Transformer, tokens, targets) -> float:
    """Return how near any router came to another choice of groups or experts."""
    margins = [float("inf")]
    hooks = [
        router.register_forward_hook(
            lambda router, _, output: margins.extend(router_margins(router, output[2]))
        )
        for router in model.routers()
    ]
    model.loss(tokens, targets)
    for hook in hooks:
        hook.remove()
    return min(margins)


def router_margins(router, affinity):
    moe = router.moe
    score = affinity if router.bias is None else affinity + router.bias
    grouped = score.unflatten(-1, (moe.n_expert_groups, -1))
    n_best = min(2, moe.experts_per_group) if moe.group_score == "top2" else 1
    groups = grouped.topk(n_best).values.sum(-1).sort(descending=True)
    yield gap_after(groups.values, moe.n_limited_groups)
    is_open = groups.indices[:, : moe.n_limited_groups, None]
    best = grouped.gather(1, is_open.expand(-1, -1, moe.experts_per_group)).flatten(1)
    yield gap_after(best.sort(descending=True).values, moe.n_activated_experts)


def gap_after(ranked, count):
    """Return the smallest step from the last that is chosen to the next."""
    if ranked.shape[1] == count:
        return float("inf")
    return (ranked[:, count - 1] - ranked[:, count]).min().item()


def draw_batch(data, vocab_size):
    """Return tokens, and as targets the token after each; the last has none."""
    shape = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
    tokens = torch.randint(0, vocab_size, shape)
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    return tokens, targets


def assert_same_gradients(pairs, model):
    pairs = list(pairs)
    assert len(pairs) == len(list(model.parameters()))
    for name, theirs, ours in pairs:
        torch.testing.assert_close(
            ours.grad,
            theirs.grad,
            rtol=RTOL,
            atol=ATOL,
            msg=lambda message, name=name: f"gradient of {name}: {message}",
        )


def watch_routers(hf):
    """Return a list that fills with each router's logits as the model runs."""
    seen = []
    for layer in hf.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    return seen


def sequence_balance(hf, batch, logits):
    """Return equations 17 to 20 of one router; transformers has no balance loss."""
    is_v3 = hf.config.model_type == "deepseek_v3"
    affinity = logits.sigmoid() if is_v3 else logits.softmax(-1)
    total, k = 0.0, hf.config.num_experts_per_tok
    for sequence in affinity.chunk(batch):
        n_tokens, n_experts = sequence.shape
        chosen = F.one_hot(sequence.topk(k).indices, n_experts).sum(dim=(0, 1))
        share = (sequence / sequence.sum(-1, keepdim=True)).mean(0)
        total = total + (chosen * n_experts / (k * n_tokens) * share).sum() / batch
    return total


every_version = pytest.mark.parametrize("version", VERSIONS)
with_and_without_query_rank = pytest.mark.parametrize("has_query_rank", [False, True])
with_and_without_yarn = pytest.mark.parametrize("has_yarn", [False, True])


@every_version
@with_and_without_query_rank
@with_and_without_yarn
@drawn
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_logits_loss_and_every_gradient_agree(
    tmp_path, version, has_query_rank, has_yarn, data, seed
):
    config = data.draw(hf_configs(version, has_query_rank, has_yarn))
    torch.manual_seed(seed)
    hf = as_reference(VERSIONS[version][1](config))
    randomise(hf)
    hf.save_pretrained(tmp_path)
    model = load_hf(tmp_path)
    tokens, targets = draw_batch(data, config.vocab_size)
    assume(smallest_margin(model, tokens, targets) > NEAR_TIE)

    router_logits = watch_routers(hf)
    expected = hf(tokens, labels=tokens)
    torch.testing.assert_close(model(tokens), expected.logits, rtol=RTOL, atol=ATOL)

    parts = model.loss(tokens, targets)
    balance = sum(sequence_balance(hf, len(tokens), logits) for logits in router_logits)
    total = expected.loss + config.aux_loss_alpha * balance
    torch.testing.assert_close(parts.main, expected.loss.detach(), rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(parts.total, total, rtol=RTOL, atol=ATOL)

    parts.total.backward()
    total.backward()
    assert_same_gradients(corresponding(hf, model), model)


@every_version
@drawn
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_transformers_reads_what_save_hf_writes(tmp_path, version, data, seed):
    kind = data.draw(st.booleans()), data.draw(st.booleans())
    config = data.draw(hf_configs(version, *kind))
    torch.manual_seed(seed)
    model = Transformer(ModelConfig.from_hf(config.to_dict()))
    randomise(model)
    tokens, targets = draw_batch(data, config.vocab_size)
    assume(smallest_margin(model, tokens, targets) > NEAR_TIE)

    shard = data.draw(st.sampled_from([1, 5_000, 10**9]))
    save_hf(model, tmp_path, max_shard_bytes=shard)
    hf = as_reference(VERSIONS[version][1].from_pretrained(tmp_path))

    torch.testing.assert_close(hf(tokens).logits, model(tokens), rtol=RTOL, atol=ATOL)


def mtp_model(hf, model):
    """Return transformers' own MTP modules, with the weights of labkit's."""
    mtp = MtpModel(hf, len(model.mtp))
    mtp.set_experts_implementation("eager")
    with torch.no_grad():
        for _, theirs, ours in mtp_pairs(mtp, model):
            theirs.copy_(ours)
        for theirs, ours in zip(mtp.layers, model.mtp, strict=True):
            use_one_epsilon(theirs.mtp_block, hf.config)
            if isinstance(ours.block.ffn, MoE):
                bias = theirs.mtp_block.mlp.gate.e_score_correction_bias
                bias.copy_(ours.block.ffn.gate.bias)
    return mtp


def mtp_loss(hf, mtp, tokens, targets):
    """Return the summed cross-entropy of all depths, by equations 21 to 24."""
    total = 0.0
    hidden = hf.model(tokens).last_hidden_state
    for depth, layer in enumerate(mtp.layers, start=1):
        length = tokens.shape[1] - depth
        if length < 1:
            break
        embedded = hf.model.embed_tokens(targets[:, depth - 1 : -1])
        hidden = layer(
            embedded,
            hidden[:, :length],
            position_embeddings=hf.model.rotary_emb(hidden, torch.arange(length)[None]),
            attention_mask=torch.full((length, length), -torch.inf).triu(1),
            position_ids=None,
            cache=None,
        )
        logits, wanted = hf.lm_head(hidden), targets[:, depth:]
        total += F.cross_entropy(logits.mT, wanted, reduction="sum")
    return total


@drawn
@given(data=st.data(), seed=st.integers(0, 2**31), depth=st.integers(1, 2))
def test_mtp_loss_and_its_gradients_agree(tmp_path, data, seed, depth):
    kind = data.draw(st.booleans()), data.draw(st.booleans())
    config = data.draw(hf_configs("v3", *kind))
    config.num_mtp_layers, config.aux_loss_alpha = depth, 0.0
    torch.manual_seed(seed)
    model = Transformer(ModelConfig.from_hf(config.to_dict()))
    randomise(model)
    save_hf(model, tmp_path)
    hf = as_reference(DeepseekV3ForCausalLM.from_pretrained(tmp_path))
    mtp = mtp_model(hf, model)
    length = data.draw(st.integers(depth + 2, 9))
    sequence = torch.randint(0, config.vocab_size, (2, length))
    tokens, targets = sequence[:, :-1], sequence[:, 1:]
    assume(smallest_margin(model, tokens, targets) > NEAR_TIE)

    parts = model.loss(tokens, targets, mtp_weight=0.3)
    deeper = 0.3 / depth * mtp_loss(hf, mtp, tokens, targets) / tokens.numel()
    torch.testing.assert_close(parts.mtp, deeper.detach(), rtol=RTOL, atol=ATOL)
    main = F.cross_entropy(hf(tokens).logits.mT, targets)
    torch.testing.assert_close(parts.total, main + deeper, rtol=RTOL, atol=ATOL)
    parts.total.backward()
    (main + deeper).backward()
    pairs = [*corresponding(hf, model), *mtp_pairs(mtp, model)]
    assert_same_gradients(pairs, model)
