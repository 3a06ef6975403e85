"""What is predicted to stay under each policy, against what autograd keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from labkit.config import PRESETS
from labkit.memory.activations import bytes_by_module, model_tape
from labkit.memory.playback import kept_by_part
from labkit.memory.recompute import (
    RECOMPUTE_POLICIES,
    apply_recompute,
    block_policies,
)
from labkit.memory.recompute_kept import kept_ops
from labkit.memory.tape import Pass
from labkit.model import Transformer

FP32, BF16 = torch.float32, torch.bfloat16


def kept_and_load(cfg, step, policy, *, k=4):
    """Return the bytes that autograd keeps of a forward pass, and its routing."""
    model = apply_recompute(Transformer(cfg), policy, k=k)
    tokens, targets = torch.randint(0, 32, (2, step.batch, step.seq_len))
    foreign = [*model.parameters(), *model.buffers(), tokens, targets]
    # By what they are, so that storages that have gone are not counted.
    storages = {x.untyped_storage()._cdata: None for x in foreign}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, storage)
        return tensor.detach()

    with (
        torch.autocast("cpu", dtype=BF16, enabled=step.is_mixed),
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        loss = model.loss(tokens, targets, n_tokens=99, n_sequences=9)
    kept = [storage.nbytes() for storage in storages.values() if storage is not None]
    return sum(kept), loss.load.tolist()


def kept_tape(cfg, step, policy, *, k=4, load=None):
    """Return what operators of the model keep, and nothing else of them."""
    policies = block_policies(policy, cfg.n_layers + cfg.n_mtp, k=k)
    return kept_ops(model_tape(cfg, step, load=load), cfg, step, policies)


def predicted(cfg, step, policy, **options):
    return sum(kept_by_part(kept_tape(cfg, step, policy, **options)).values())


@pytest.mark.parametrize("compute", [FP32, BF16])
def test_every_policy_keeps_what_is_predicted_to_the_byte(small_model, compute):
    cfg, step = small_model, Pass(batch=2, seq_len=8, compute=compute)
    for policy in RECOMPUTE_POLICIES:
        if policy == "moe" and cfg.moe is None:
            continue
        kept, load = kept_and_load(cfg, step, policy, k=2)

        assert predicted(cfg, step, policy, k=2, load=load) == kept, policy


@settings(max_examples=10)
@given(
    step=st.builds(
        Pass,
        batch=st.integers(1, 3),
        seq_len=st.integers(3, 9),
        compute=st.sampled_from([FP32, BF16]),
    ),
    data=st.data(),
)
def test_any_mixture_keeps_what_is_predicted_to_the_byte(small_models, step, data):
    cfg = small_models[data.draw(st.sampled_from([*small_models]))]
    policies = ["none", "full", "selective", "attention"]
    policies += [] if cfg.moe is None else ["moe"]
    n_blocks = cfg.n_layers + cfg.n_mtp
    mixture = data.draw(
        st.lists(st.sampled_from(policies), min_size=n_blocks, max_size=n_blocks)
    )
    kept, load = kept_and_load(cfg, step, mixture)

    assert predicted(cfg, step, mixture, load=load) == kept


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_none_leaves_the_plain_tape(device, small_models):
    step = Pass(batch=2, seq_len=8, compute=BF16, device=device)
    cfg = small_models["multi-token"]

    assert bytes_by_module(kept_tape(cfg, step, "none")) == bytes_by_module(
        model_tape(cfg, step)
    )


V3 = PRESETS["v3-671b"]


def layer_bytes_per_token(policy):
    """Return what one MoE layer of DeepSeek-V3 keeps of a token, in BF16 on a GPU."""
    step = Pass(batch=1, seq_len=4096, weights=BF16, compute=BF16, device="gpu")
    by_module = bytes_by_module(kept_tape(V3, step, policy))
    names = [name for name in by_module if name.startswith("layers.30.")]
    return sum(by_module[name] for name in names) / step.n_tokens


def test_deepseek_v3_keeps_by_its_own_policy_what_can_be_counted_by_hand():
    mla, moe = V3.attention, V3.moe
    choices = moe.n_activated_experts
    attention = mla.q_lora_rank + mla.cache_width + mla.n_heads * mla.v_head_dim
    hidden = 2 * (choices + moe.n_shared_experts) * moe.moe_inter_dim
    by_hand = 2 * (2 * V3.dim + attention + hidden + choices)
    by_hand += 2 * 8 * choices  # where the row of each choice lies
    affinity = 4 * moe.n_routed_experts  # which the balance loss reads
    # The kernel keeps values and result, both padded, and its own notes.
    kernel = 2 * 2 * mla.n_heads * mla.qk_head_dim + 4 * mla.n_heads + 16 / 4096
    selective = layer_bytes_per_token("selective")

    assert selective == by_hand + affinity + kernel
    assert layer_bytes_per_token("full") == 2 * V3.dim + affinity
    assert selective < layer_bytes_per_token("moe") < layer_bytes_per_token("none")


def test_a_gpu_norm_that_runs_again_keeps_its_input_and_not_the_copy(small_models):
    step = Pass(batch=1, seq_len=8, compute=BF16, device="gpu")
    cfg = small_models["sparse"]
    plain, saving = (
        {
            (op.module, kept.what): kept.n_bytes
            for op in kept_tape(cfg, step, policy)
            for kept in op.kept
        }
        for policy in ("none", "selective")
    )
    norm = "layers.0.attn.kv_norm"

    assert plain[norm, "input in FP32"] == 4 * 8 * cfg.attention.kv_lora_rank
    assert saving[norm, "input"] == plain[norm, "input in FP32"] // 2
    assert (norm, "inverse scales") not in saving
