"""Attention layers against the paper's equations, and the kernels below them."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from labkit.config import GQAConfig, MLAConfig, ModelConfig, RopeConfig
from labkit.model import Transformer
from labkit.model import attention_core as core
from labkit.model.attention import GQA, MLA, absorbed_flops, expanded_flops

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def config(attention, **changes):
    return ModelConfig(
        vocab_size=7, dim=12, n_layers=1, inter_dim=8, attention=attention, **changes
    )


MLA_CONFIG = config(
    MLAConfig(
        n_heads=3,
        q_lora_rank=5,
        kv_lora_rank=4,
        qk_nope_head_dim=6,
        qk_rope_head_dim=2,
        v_head_dim=7,
    ),
    rope=RopeConfig(rope_factor=4.0, original_seq_len=32, mscale_all_dim=0.8),
    max_seq_len=128,
)


def built(cfg):
    """Return a model's only attention layer with large weights, and its rotations."""
    model = Transformer(cfg)
    layer = model.layers[0].attn
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return layer, model.turns


def rms_norm(x, gain, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def turned(x, turns):
    """Return `x` (b, s, r) with its pairs turned, by the 2 x 2 matrix of each."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = (
        even * turns.real - odd * turns.imag,
        even * turns.imag + odd * turns.real,
    )
    return torch.stack(turned, dim=-1).flatten(-2)


def plain_attention(q, k, v, scale, mask=None):
    """Return softmax(q k / ...) v of one head, (b, s, ·), the whole matrix at once."""
    scores = q @ k.mT * scale
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def paper_mla(layer, x, turns):
    """Equations 1 to 11 of DeepSeek-V3, one head after another."""
    mla, heads = layer.mla, []
    if mla.q_lora_rank is None:
        queries = x @ layer.wq.weight.T
    else:
        compressed = rms_norm(x @ layer.wq_a.weight.T, layer.q_norm.weight)
        queries = compressed @ layer.wq_b.weight.T
    latent, key = (x @ layer.wkv_a.weight.T).tensor_split([mla.kv_lora_rank], -1)
    up = rms_norm(latent, layer.kv_norm.weight) @ layer.wkv_b.weight.T
    key = turned(key, turns)
    nope, width = mla.qk_nope_head_dim, mla.qk_nope_head_dim + mla.v_head_dim
    for head in range(mla.n_heads):
        q = queries[..., head * mla.qk_head_dim :][..., : mla.qk_head_dim]
        q = torch.cat((q[..., :nope], turned(q[..., nope:], turns)), dim=-1)
        k, v = up[..., head * width :][..., :width].tensor_split([nope], -1)
        k = torch.cat((k, key), dim=-1)
        heads.append(plain_attention(q, k, v, layer.softmax_scale))
    return torch.cat(heads, dim=-1) @ layer.wo.weight.T


def paper_gqa(layer, x, turns):
    gqa, heads = layer.gqa, []

    def head(linear, index):
        return (x @ linear.weight.T).unflatten(-1, (-1, gqa.head_dim))[:, :, index]

    for index in range(gqa.n_heads):
        group = index * gqa.n_kv_heads // gqa.n_heads
        q = turned(head(layer.wq, index), turns)
        k = turned(head(layer.wk, group), turns)
        heads.append(plain_attention(q, k, head(layer.wv, group), gqa.head_dim**-0.5))
    return torch.cat(heads, dim=-1) @ layer.wo.weight.T


@pytest.mark.parametrize("q_lora_rank", [None, 5])
@pytest.mark.parametrize("v_head_dim", [3, 8, 11])
def test_mla_is_the_papers_equations(q_lora_rank, v_head_dim):
    mla = replace(MLA_CONFIG.attention, q_lora_rank=q_lora_rank, v_head_dim=v_head_dim)
    layer, turns = built(replace(MLA_CONFIG, attention=mla))
    x, turns = torch.randn(2, 9, 12), turns(torch.arange(9))
    torch.testing.assert_close(layer(x, turns), paper_mla(layer, x, turns), **CLOSE)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_gqa_is_plain_attention_with_shared_keys(n_kv_heads):
    layer, turns = built(
        config(GQAConfig(n_heads=4, n_kv_heads=n_kv_heads, head_dim=6))
    )
    x, turns = torch.randn(2, 9, 12), turns(torch.arange(9))
    torch.testing.assert_close(layer(x, turns), paper_gqa(layer, x, turns), **CLOSE)


def test_gqa_is_mha_whose_heads_repeat_keys_and_values():
    gqa, turns = built(config(GQAConfig(n_heads=4, n_kv_heads=2, head_dim=6)))
    mha, _ = built(config(GQAConfig(n_heads=4, n_kv_heads=4, head_dim=6)))
    repeated = gqa.state_dict()
    for name in ("wk.weight", "wv.weight"):
        per_head = repeated[name].unflatten(0, (2, 6)).repeat_interleave(2, dim=0)
        repeated[name] = per_head.flatten(0, 1)
    mha.load_state_dict(repeated)
    x, turns = torch.randn(2, 9, 12), turns(torch.arange(9))
    torch.testing.assert_close(gqa(x, turns), mha(x, turns), **CLOSE)


@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_absorbed_and_expanded_are_the_same_function(data, seed):
    draw = data.draw
    mla = MLAConfig(
        n_heads=draw(st.integers(1, 4)),
        kv_lora_rank=draw(st.integers(1, 9)),
        qk_nope_head_dim=draw(st.integers(1, 7)),
        qk_rope_head_dim=2 * draw(st.integers(1, 3)),
        v_head_dim=draw(st.integers(1, 9)),
    )
    torch.manual_seed(seed)
    layer, turns = built(config(mla))
    seq_len = draw(st.integers(1, 7))
    x, turns = torch.randn(2, seq_len, 12), turns(torch.arange(seq_len))
    q_nope, q_pe = layer.queries(x, turns)
    latent, k_pe = layer.latents(x, turns)
    entries = torch.cat((latent, k_pe), dim=-1)
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(2, seq_len, seq_len) < 0.5
        mask |= torch.eye(seq_len, dtype=torch.bool)
    torch.testing.assert_close(
        layer.absorbed(q_nope, q_pe, entries, mask),
        layer.expanded(q_nope, q_pe, latent, k_pe, mask),
        **CLOSE,
    )


def test_absorbing_pays_for_one_new_token_but_not_for_a_whole_sequence():
    v3 = MLAConfig(n_heads=128, q_lora_rank=1536)
    assert absorbed_flops(v3, 1, 4096) < expanded_flops(v3, 1, 4096) / 30
    assert expanded_flops(v3, 4096, 4096) < absorbed_flops(v3, 4096, 4096)


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_a_later_token_changes_nothing_before_it(kind):
    gqa = config(GQAConfig(n_heads=4, n_kv_heads=2, head_dim=6))
    layer, turns = built(MLA_CONFIG if kind == "mla" else gqa)
    x, turns = torch.randn(1, 9, 12), turns(torch.arange(9))
    changed = x.clone()
    changed[:, 6] += 1
    before, after = layer(x, turns), layer(changed, turns)
    assert torch.equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(-1).all()


# The core: (batch, heads, sequence, width), values of any width.


def random_heads(seq_len, width=6, v_width=4, dtype=torch.float32):
    shapes = [(2, 3, seq_len, w) for w in (width, width, v_width)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@settings(max_examples=20)
@given(
    seq_len=st.sampled_from([1, 2, 7, 127, 128, 129, 200, 300]),
    width=st.integers(1, 9),
    v_width=st.integers(1, 12),
    block_bytes=st.sampled_from([1, 200_000, core.BLOCK_BYTES]),
)
def test_causal_attention_and_its_gradients_are_those_of_the_whole_matrix(
    seq_len, width, v_width, block_bytes
):
    torch.manual_seed(seq_len)
    inputs = random_heads(seq_len, width, v_width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "BLOCK_BYTES", block_bytes)
        out = core.attend(*inputs, scale=0.7)
        weight = torch.randn_like(out)
        grads = torch.autograd.grad((out * weight).sum(), inputs)
    expected = plain_attention(*inputs, 0.7)
    expected_grads = torch.autograd.grad((expected * weight).sum(), inputs)
    torch.testing.assert_close(out, expected, **CLOSE)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_gradients_of_causal_attention_pass_gradcheck_across_blocks(monkeypatch):
    monkeypatch.setattr(core, "BLOCK_QUERIES", 2)
    inputs = [x[:1, :2] for x in random_heads(5, 3, 2, dtype=torch.float64)]
    inputs = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.gradcheck(lambda *x: core.attend(*x, scale=0.7), inputs)


@pytest.mark.parametrize("v_width", [4, 6, 9])
def test_a_mask_decides_who_sees_whom(v_width):
    q, k, v = random_heads(8, v_width=v_width)
    q = q[:, :, :5]
    mask = torch.rand(2, 5, 8) < 0.5
    mask[:, :, 0] = True
    out = core.attend(q, k, v, scale=0.7, mask=mask)
    expected = plain_attention(q, k, v, 0.7, mask.unsqueeze(1))
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("n_hidden", [0, 4])
def test_heads_may_share_keys_that_are_their_values(n_hidden):
    q, entries = 3 * torch.randn(2, 6, 10), torch.randn(2, 9, 10)
    visible = torch.ones(2, 6, 9, dtype=torch.bool)
    visible[..., :n_hidden] = False
    out = core.attend_shared(q, entries, scale=0.3, mask=visible if n_hidden else None)
    scores = (q.double() @ entries.double().mT * 0.3).masked_fill(~visible, -math.inf)
    expected = (scores.softmax(dim=-1) @ entries.double()).float()
    torch.testing.assert_close(out, expected, **CLOSE)


def test_bf16_attention_is_within_its_rounding():
    q, k, v = random_heads(150, dtype=torch.bfloat16)
    out = core.attend(q, k, v, scale=0.7)
    assert out.dtype == torch.bfloat16
    expected = plain_attention(q.float(), k.float(), v.float(), 0.7)
    assert (out - expected).abs().max() < 2**-6 * v.abs().max()


def test_autocast_leaves_the_chosen_dtypes_of_the_core_alone():
    inputs = random_heads(20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            core.attend(*inputs, scale=0.7), core.attend(*inputs, scale=0.7)
        )
        out = core.attend(*inputs, scale=0.7)
    assert torch.equal(out, core.attend(*inputs, scale=0.7))


SEQ_LEN = 2048
LONG = {
    "mla": MLA_CONFIG,
    "gqa": config(GQAConfig(n_heads=2, n_kv_heads=1, head_dim=8)),
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_stores_nothing_of_the_size_of_the_score_matrix(kind, dtype):
    layer, turns = built(LONG[kind])
    layer.to(dtype)
    x = torch.randn(1, SEQ_LEN, 12, dtype=dtype, requires_grad=True)
    saved = []

    def note(tensor):
        saved.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    turns = turns(torch.arange(SEQ_LEN))
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run,
    ):
        layer(x, turns).sum().backward()

    assert saved
    assert max(saved) < SEQ_LEN**2 / 10
    # Nor is such a matrix made and dropped, of any head, in either direction.
    largest = max(event.self_cpu_memory_usage for event in run.events())
    assert largest < SEQ_LEN**2 * x.element_size() / 2


def test_layers_are_built_by_the_kind_of_their_config():
    assert isinstance(built(MLA_CONFIG)[0], MLA)
    assert isinstance(built(LONG["gqa"])[0], GQA)
