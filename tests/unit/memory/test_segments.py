"""Tapes in brief give the same sums as tapes in full."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import PRESETS, GQAConfig, Layout
from labkit.memory.activations import model_tape
from labkit.memory.playback import fullest_instant, kept_by_part
from labkit.memory.segments import chunk_segment, segment
from labkit.memory.stages import Chunk
from labkit.memory.tape import Kept, Op, Pass

BYTES = st.integers(0, 100)
OPS = st.builds(
    Op,
    module=st.uuids().map(str),
    kept=BYTES.map(lambda n: (Kept("input", n),)),
    gradient_bytes=BYTES,
    working_bytes=BYTES,
    early_bytes=BYTES,
)


@given(
    layer=st.lists(OPS, max_size=4, unique_by=lambda op: op.module),
    last=st.lists(OPS, max_size=3, unique_by=lambda op: op.module),
    n_layers=st.integers(0, 5),
    has_gradients=st.booleans(),
)
def test_layers_in_brief_have_the_sums_of_layers_in_full(
    layer, last, n_layers, has_gradients
):
    tape = [
        op._replace(module=f"{index}.{op.module}")
        for index in range(n_layers)
        for op in layer
    ]
    tape += last
    brief = segment(layer, has_gradients=has_gradients).times(n_layers)
    brief = brief.then(segment(last, has_gradients=has_gradients))
    full = segment(tape, has_gradients=has_gradients)

    assert brief.fullest.total() == full.fullest.total()
    assert +brief.kept == +full.kept
    assert +brief.before == +full.before
    assert +brief.after == +full.after


@pytest.mark.parametrize("name", ["tiny", "small", "dense", "gqa", "vocabulary"])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_model_in_brief_has_the_sums_of_its_tape(name, has_gradients):
    variants = {
        "dense": replace(PRESETS["tiny"], moe=None, mtp=None),
        "gqa": replace(
            PRESETS["tiny"], attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=16)
        ),
        "vocabulary": replace(PRESETS["tiny"], vocab_size=5000),
    }
    cfg = variants.get(name) or PRESETS[name]
    step = Pass(batch=2, seq_len=64, compute=torch.bfloat16)
    tape = model_tape(cfg, step)
    whole = Chunk(layers=range(cfg.n_layers), is_first=True, is_last=True)
    brief = chunk_segment(cfg, step, whole, has_gradients=has_gradients)

    assert +brief.kept == +Counter(kept_by_part(tape))
    full = fullest_instant(tape, has_gradients=has_gradients)
    assert brief.fullest.total() == sum(full.values())


def test_chunks_keep_together_what_the_model_keeps():
    cfg = PRESETS["v3-671b"]
    step = Pass(batch=1, seq_len=4096, device="gpu")
    chunks = [
        Chunk(layers=range(0, 20), is_first=True),
        Chunk(layers=range(20, 61), is_last=True),
    ]
    kept = sum((chunk_segment(cfg, step, chunk).kept for chunk in chunks), Counter())
    rotations = 4096 * 32 * 8  # of each chunk

    assert kept.total() - rotations == sum(kept_by_part(model_tape(cfg, step)).values())


def test_a_rank_keeps_its_part():
    cfg, step = PRESETS["v3-671b"], Pass(batch=1, seq_len=4096, device="gpu")
    chunk = Chunk(layers=range(20, 24))
    whole = chunk_segment(cfg, step, chunk).kept.total()
    part = chunk_segment(cfg, step, chunk, layout=Layout(tp=4)).kept.total()

    assert whole / 4 < part < whole / 3
