"""What notebook 06 measures: a decoding step, and the FLOPs of a prompt."""

from dataclasses import replace

import pytest
import torch

from labkit.config import GQAConfig, MLAConfig, ModelConfig
from labkit.model import Transformer
from labkit.workbook.caching import count_prompt, decode_step, filled_cache

MLA = MLAConfig(
    n_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4
)
CFG = ModelConfig(vocab_size=16, dim=8, n_layers=2, inter_dim=8, attention=MLA)


def test_a_filled_cache_holds_noise_and_has_room_for_the_next_token():
    cache = filled_cache(CFG, 5, n_free=2)

    assert cache.lengths == (5,)
    assert cache.max_seq == 7
    assert cache.entries[:, :, :5].std() == pytest.approx(1, abs=0.2)
    assert not cache.entries[:, :, 5:].any()


def test_a_decoding_step_can_be_repeated_in_the_same_context():
    cache = filled_cache(CFG, 5)
    step = decode_step(Transformer(CFG), cache)

    assert torch.equal(step(), step())
    assert cache.lengths == (5,)


@pytest.mark.parametrize("n_tokens", [128, 256, 384])
@pytest.mark.parametrize(
    "attention", [MLA, GQAConfig(n_heads=2, n_kv_heads=1, head_dim=6)]
)
def test_flops_of_a_prompt_are_those_of_its_matrices(attention, n_tokens):
    cfg = replace(CFG, attention=attention)
    flops = count_prompt(Transformer(cfg), n_tokens)

    weights = cfg.n_active_params() - (2 * cfg.n_layers + 1) * cfg.dim
    if isinstance(attention, MLAConfig):
        weights -= cfg.n_layers * attention.kv_lora_rank  # a norm, not a matrix
    assert flops.linear == 2 * n_tokens * weights
    # Blocks of 128 queries against all keys up to their last: 1 + 2 + … blocks.
    n_blocks = n_tokens // 128
    n_pairs = 128 * 128 * n_blocks * (n_blocks + 1) // 2
    widths = attention.qk_head_dim + attention.v_head_dim
    assert flops.pairs == 2 * n_pairs * attention.n_heads * widths * cfg.n_layers
