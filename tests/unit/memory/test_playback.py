"""The fullest instant of forward and backward, predicted and counted."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.config import PRESETS, GQAConfig, MLAConfig, MoEConfig, MTPConfig
from labkit.memory import AllocationCount
from labkit.memory.activations import model_tape
from labkit.memory.playback import fullest_instant, gradient_bytes, kept_by_part
from labkit.memory.tape import Kept, Op, Pass
from labkit.model import Transformer

FP32, BF16 = torch.float32, torch.bfloat16

MLA = MLAConfig(
    n_heads=3,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
)
ATTENTION = {
    "mla": MLA,
    "mla-direct": replace(MLA, q_lora_rank=None),
    "gqa": GQAConfig(n_heads=6, n_kv_heads=2, head_dim=8),
    "mha": GQAConfig(n_heads=4, n_kv_heads=4, head_dim=12),
}
EXPERTS = MoEConfig(n_routed_experts=4, n_activated_experts=2, moe_inter_dim=44)


def test_storages_go_and_gradients_come():
    tape = [
        Op("first", (Kept("input", 10),), gradient_bytes=5, working_bytes=1),
        Op("middle", (Kept("input", 100),), working_bytes=20),
        Op("loss", (Kept("log-probabilities", 7, "logits"),), working_bytes=9),
    ]
    # Before the loss 117 live, and 9; in the middle 110, and 20; at last 10 + 5 + 1.
    expected = {"activations": 110, "temporaries": 20}

    assert +Counter(fullest_instant(tape)) == expected
    assert +Counter(kept_by_part(tape)) == {"activations": 110, "logits": 7}
    assert gradient_bytes(tape) == 5


def test_gradients_to_add_to_live_from_the_start():
    tape = [
        Op("first", (Kept("input", 1),), gradient_bytes=50),
        Op("last", (Kept("input", 2),), gradient_bytes=50),
    ]

    assert fullest_instant(tape)["gradients"] == 100
    assert fullest_instant(tape, has_gradients=True)["gradients"] == 150


def test_gradients_go_into_a_buffer_as_soon_as_each_is_made():
    tape = [
        Op("first", (Kept("input", 1),), gradient_bytes=50, working_bytes=3),
        Op("last", (Kept("input", 2),), gradient_bytes=60),
    ]

    for has_gradients in (False, True):  # which lie in the buffer too
        fullest = fullest_instant(tape, has_gradients=has_gradients, has_buffer=True)
        assert +Counter(fullest) == {"activations": 3, "temporaries": 60}


def test_a_parameter_that_is_used_twice_has_one_gradient_in_the_end():
    tape = [Op("embed", gradient_bytes=8), Op("embed", gradient_bytes=8)]

    assert gradient_bytes(tape) == 8
    assert fullest_instant(tape)["gradients"] == 8 + 8 + 8  # and their sum


def test_early_gradients_wait_for_their_operator():
    tape = [
        Op("gate", early_bytes=30, gradient_bytes=1),
        Op("rest", (Kept("input", 5),), working_bytes=10),
    ]

    assert +Counter(fullest_instant(tape)) == {"activations": 5, "temporaries": 40}


@st.composite
def models(draw):
    is_sparse = draw(st.booleans())
    return replace(
        PRESETS["tiny"],
        dim=draw(st.sampled_from([32, 40, 64])),
        inter_dim=draw(st.sampled_from([24, 120])),
        vocab_size=draw(st.sampled_from([50, 400])),
        n_layers=draw(st.integers(1, 2)),
        attention=ATTENTION[draw(st.sampled_from(sorted(ATTENTION)))],
        moe=EXPERTS if is_sparse else None,
        mtp=draw(st.sampled_from([None, MTPConfig()])),
    )


@st.composite
def passes(draw):
    dtypes = [(FP32, FP32), (FP32, BF16), (BF16, BF16)]
    weights, compute = draw(st.sampled_from(dtypes))
    seq_len = draw(st.sampled_from([8, 30, 150]))
    batch = draw(st.integers(1, 3))
    return Pass(batch=batch, seq_len=seq_len, weights=weights, compute=compute)


@given(cfg=models(), step=passes(), n_micro_batches=st.integers(1, 2))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("unchecked")  # each of very many operators would be
def test_the_peak_is_predicted_within_five_percent(cfg, step, n_micro_batches):
    model = Transformer(cfg, dtype=step.weights)
    tokens = torch.randint(0, cfg.vocab_size, (step.batch, step.seq_len))
    with AllocationCount() as count:
        for _ in range(n_micro_batches):
            with torch.autocast("cpu", dtype=step.compute, enabled=step.is_mixed):
                loss = model.loss(
                    tokens, tokens, n_tokens=step.n_tokens, n_sequences=step.batch
                )
            loss.total.backward()
    load = loss.load.tolist()
    tape = model_tape(cfg, step, load=load)
    fullest = fullest_instant(tape, has_gradients=n_micro_batches > 1)

    assert gradient_bytes(tape) == sum(p.grad.nbytes for p in model.parameters())
    assert sum(fullest.values()) == pytest.approx(count.peak_bytes, rel=0.05)
