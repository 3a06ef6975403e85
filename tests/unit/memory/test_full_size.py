"""A layer of DeepSeek-V3 in its full size, on fake tensors."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from labkit.config import PRESETS
from labkit.memory.activations import block_tape
from labkit.memory.fakes import faked
from labkit.memory.kept_attention import rotations
from labkit.memory.playback import kept_by_part
from labkit.memory.tape import Pass
from labkit.model.transformer import Block

V3 = PRESETS["v3-671b"]
LOCAL = replace(V3.moe, n_routed_experts=32, n_expert_groups=1, n_limited_groups=1)
"""The experts of one rank of eight."""


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # operators by the ten thousand
def test_an_moe_layer_of_4096_tokens_keeps_the_predicted_bytes():
    cfg, bf16 = replace(V3, moe=LOCAL), torch.bfloat16
    step = Pass(batch=1, seq_len=4096, weights=bf16, compute=bf16, n_rows=8 * 4096)
    with torch.device("meta"):
        block = Block(cfg, is_dense=False).to(bf16)
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        faked(block)
        x = torch.empty(1, 4096, cfg.dim, dtype=bf16).requires_grad_()
        turns = torch.empty(4096, 32, dtype=torch.complex64)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, turns)
    for parameter in block.parameters():
        storages.pop(parameter.untyped_storage()._cdata, None)
    tape = block_tape(cfg, step, is_dense=False, stream=bf16)
    predicted = kept_by_part([*tape, rotations(cfg.attention, step)])

    assert sum(s.nbytes() for s in storages.values()) == sum(predicted.values())
    assert round(sum(predicted.values()) / 2**30, 2) == 1.43
