"""Predicted activations against the storages that autograd really keeps."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from labkit.config import (
    PRESETS,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
)
from labkit.memory.activations import (
    block_tape,
    bytes_by_module,
    model_tape,
)
from labkit.memory.kept_attention import RANDOM_STATE_BYTES
from labkit.memory.kept_ffn import expected_rows
from labkit.memory.playback import kept_by_part
from labkit.memory.tape import Pass
from labkit.model import LossParts, Transformer, attention

FP32, BF16 = torch.float32, torch.bfloat16


class KeptStorages:
    """Storages that autograd keeps, each once, by the innermost module that runs."""

    def __init__(self, model: nn.Module, *inputs: torch.Tensor) -> None:
        self.model = model
        tensors = [*model.parameters(), *model.buffers(), *inputs]
        self.foreign = {t.untyped_storage()._cdata for t in tensors}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.by_module: Counter[str] = Counter()
        self.running = ["loss"]

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        handles = []
        for name, module in self.model.named_modules():
            if name:
                enter, leave = self._hooks(name)
                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(leave))
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        for handle in handles:
            handle.remove()

    def _hooks(self, name):
        def enter(module, args):
            self.running.append(name)

        def leave(module, args, out):
            self.running.pop()

        return enter, leave

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.foreign | self.storages.keys():
            self.storages[storage._cdata] = storage
            self.by_module[self.running[-1]] += storage.nbytes()
        return tensor


def loss_of(cfg: ModelConfig, step: Pass) -> tuple[KeptStorages, LossParts]:
    """Run the forward pass of a training step, and watch what it keeps."""
    model = Transformer(cfg, dtype=step.weights)
    tokens = torch.randint(0, cfg.vocab_size, (step.batch, step.seq_len + 1))
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    kept = KeptStorages(model, tokens, targets)
    autocast = torch.autocast("cpu", dtype=step.compute, enabled=step.is_mixed)
    with kept.watch(), autocast:
        loss = model.loss(
            tokens, targets, n_tokens=step.n_tokens, n_sequences=step.batch
        )
    return kept, loss


SIZES = st.integers(1, 24)

MLA = st.builds(
    MLAConfig,
    n_heads=st.integers(1, 4),
    q_lora_rank=st.none() | SIZES,
    kv_lora_rank=SIZES,
    qk_nope_head_dim=SIZES,
    qk_rope_head_dim=st.integers(1, 4).map(lambda n: 2 * n),
    v_head_dim=SIZES,
)


@st.composite
def grouped(draw):
    n_kv_heads = draw(st.integers(1, 3))
    return GQAConfig(
        n_heads=n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=n_kv_heads,
        head_dim=2 * draw(st.integers(1, 6)),
    )


@st.composite
def experts(draw):
    n_groups = draw(st.integers(1, 3))
    return MoEConfig(
        n_routed_experts=2 * n_groups,
        n_activated_experts=draw(st.integers(1, 2)),
        moe_inter_dim=draw(SIZES),
        n_shared_experts=draw(st.integers(0, 2)),
        n_expert_groups=n_groups,
        n_limited_groups=draw(st.integers(1, n_groups)),
        score_func=draw(st.sampled_from(["sigmoid", "softmax"])),
        norm_topk_prob=draw(st.booleans()),
        balance_loss_weight=draw(st.sampled_from([0.0, 1e-4])),
    )


@st.composite
def models(draw):
    n_layers = draw(st.integers(1, 3))
    return ModelConfig(
        vocab_size=draw(st.integers(2, 60)),
        dim=draw(SIZES),
        n_layers=n_layers,
        inter_dim=draw(SIZES),
        attention=draw(MLA | grouped()),
        moe=draw(st.none() | experts()),
        n_dense_layers=draw(st.integers(0, n_layers)),
        mtp=draw(st.none() | st.builds(MTPConfig, depth=st.integers(1, 2))),
    )


@st.composite
def passes(draw):
    weights, compute = draw(st.sampled_from([(FP32, FP32), (FP32, BF16), (BF16, BF16)]))
    batch, seq_len = draw(st.integers(1, 3)), draw(st.integers(4, 40))
    return Pass(batch=batch, seq_len=seq_len, weights=weights, compute=compute)


@given(cfg=models(), step=passes())
@settings(max_examples=30)
def test_every_module_keeps_the_predicted_bytes(cfg, step):
    kept, loss = loss_of(cfg, step)
    predicted = Counter()
    for op in model_tape(cfg, step, load=loss.load.tolist()):
        predicted[op.module] += sum(storage.n_bytes for storage in op.kept)

    assert predicted == kept.by_module


@pytest.mark.parametrize("name", ["tiny", "small"])
@pytest.mark.parametrize("compute", [FP32, BF16])
def test_even_routing_predicts_the_presets_within_two_percent(name, compute):
    cfg, step = PRESETS[name], Pass(batch=4, seq_len=256, compute=compute)
    kept, _ = loss_of(cfg, step)
    predicted = sum(kept_by_part(model_tape(cfg, step)).values())

    assert predicted == pytest.approx(kept.by_module.total(), rel=0.02)


def fused(q, k, v, *, scale, mask=None):
    """Attend as on a GPU: PyTorch's kernel, over keys and values of equal width."""
    group, width = q.shape[1] // k.shape[1], max(q.shape[-1], v.shape[-1])
    k, v = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (k, v))
    padded = (
        x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
        for x in (q, k, v)
    )
    out = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale)
    return out[..., : v.shape[-1]]


@pytest.mark.parametrize("v_head_dim", [8, 16, 24])
def test_of_mla_a_gpus_fused_kernel_keeps_what_the_cpus_does(v_head_dim, monkeypatch):
    mla = MLAConfig(
        n_heads=3,
        kv_lora_rank=8,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=v_head_dim,
    )
    require_equal_but_for_random_states(mla, monkeypatch)


@pytest.mark.parametrize("n_kv_heads", [2, 4])
def test_of_gqa_a_gpus_fused_kernel_keeps_what_the_cpus_does(n_kv_heads, monkeypatch):
    gqa = GQAConfig(n_heads=4, n_kv_heads=n_kv_heads, head_dim=8)
    require_equal_but_for_random_states(gqa, monkeypatch)


def require_equal_but_for_random_states(parts, monkeypatch):
    monkeypatch.setattr(attention, "attend", fused)
    cfg = replace(PRESETS["tiny"], attention=parts, n_layers=2, mtp=None)
    step = Pass(batch=2, seq_len=12, device="gpu")
    kept, loss = loss_of(cfg, step)
    predicted = sum(kept_by_part(model_tape(cfg, step)).values())

    assert predicted - 2 * RANDOM_STATE_BYTES == kept.by_module.total()


def test_a_dense_layer_keeps_what_a_hand_counts():
    gqa = GQAConfig(n_heads=2, n_kv_heads=1, head_dim=4)
    cfg = ModelConfig(
        vocab_size=10, dim=6, n_layers=1, inter_dim=5, attention=gqa, moe=None
    )
    tape = block_tape(cfg, Pass(batch=2, seq_len=3), is_dense=True, stream=FP32)
    norms = 2 * (6 + 1)  # the stream and a scale
    attention = 6 + 3 * 8 + 8  # input; queries, keys and values of 2 heads; wo's input
    ffn = 6 + 4 * 5  # input; gate, its silu, up, their product

    assert kept_by_part(tape) == {
        "activations": 4 * 2 * 3 * (norms + attention + ffn),
        "logits": 0,
        "dispatch": 0,
    }


@given(cfg=models(), step=passes())
def test_casts_are_autocasts_copies_of_all_matrices(cfg, step):
    counts = cfg.parameter_counts()
    tape = model_tape(cfg, step)
    casts = bytes_by_module(tape).get("casts", 0)
    model = Transformer(cfg, device="meta")
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    routers = sum(router.weight.numel() for router in model.routers())
    # The router computes in FP32, and an embedding is looked up.
    of_all = 2 * (matrices - routers - counts.embedding)
    assert casts == (of_all if step.is_mixed else 0)


@given(cfg=models(), step=passes())
def test_modules_and_logits_add_up_to_the_parts(cfg, step):
    tape = model_tape(cfg, step)
    parts = kept_by_part(tape)
    n_positions = sum(step.seq_len - depth for depth in range(cfg.n_mtp + 1))

    assert sum(bytes_by_module(tape).values()) == parts["activations"]
    assert parts["logits"] == 4 * step.batch * n_positions * cfg.vocab_size


def test_padding_adds_half_a_multiple_per_expert():
    moe = replace(PRESETS["tiny"].moe, n_routed_experts=8, n_activated_experts=2)
    step = Pass(batch=1, seq_len=320, compute=BF16)

    assert expected_rows(moe, step) == 640 + 8 * (10 - 1) / 2
    assert expected_rows(moe, replace(step, compute=FP32)) == 640
    assert expected_rows(moe, replace(step, device="gpu")) == 640


def test_a_dtype_wider_than_the_weights_is_refused():
    with pytest.raises(ValueError) as error:
        Pass(batch=1, seq_len=8, weights=BF16, compute=FP32)

    assert str(error.value) == (
        "autocast computes in a dtype narrower than the weights'; got weights in "
        "torch.bfloat16 and products in torch.float32. Set compute=torch.bfloat16, or "
        "weights=torch.float32."
    )


def test_sequences_too_short_for_multi_token_prediction_are_refused():
    cfg = replace(PRESETS["tiny"], mtp=MTPConfig(depth=2))
    with pytest.raises(ValueError, match="depth of multi-token prediction, 2; got 2"):
        model_tape(cfg, Pass(batch=1, seq_len=2))
