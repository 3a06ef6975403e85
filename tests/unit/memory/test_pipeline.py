"""Chunks that are priced by kinds of layers, against tapes in full."""

from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS, GQAConfig, Layout, MTPConfig
from labkit.memory.activations import model_tape
from labkit.memory.pipeline import ChunkPrice, ChunkPrices, at_once
from labkit.memory.playback import fullest_instant, kept_by_part
from labkit.memory.recompute import RECOMPUTE_POLICIES, block_policies
from labkit.memory.replay import rebuilt_casts, replay_tape
from labkit.memory.segments import Parts, Segment
from labkit.memory.stages import Chunk
from labkit.memory.tape import Pass

TINY, V3 = PRESETS["tiny"], PRESETS["v3-671b"]
MIXED = ("selective", "attention", "none", "moe", "full", "none", "none")


def price(cfg, step, chunk, *, policy="none", layout=None, has_gradients=False):
    prices = ChunkPrices(
        cfg=cfg,
        step=step,
        layout=layout or Layout(),
        policies=block_policies(policy, cfg.n_layers + cfg.n_mtp),
        has_gradients=has_gradients,
        has_buffer=False,
    )
    return prices.of(chunk).segment


def whole(cfg):
    return Chunk(layers=range(cfg.n_layers), is_first=True, is_last=True)


@pytest.mark.parametrize("policy", [*RECOMPUTE_POLICIES, MIXED], ids=str)
@pytest.mark.parametrize("mtp", [None, MTPConfig()], ids=["", "mtp"])
@pytest.mark.parametrize("tp", [1, 2])
def test_chunks_priced_by_kind_are_the_whole_tape(policy, mtp, tp):
    cfg = replace(TINY, mtp=mtp, n_layers=6)
    step, layout = Pass(batch=1, seq_len=64), Layout(dp=2, tp=tp, ep=2)
    policy = policy if isinstance(policy, str) else policy[: 6 + cfg.n_mtp]
    brief = price(cfg, step, whole(cfg), policy=policy, layout=layout)
    tape = replay_tape(cfg, step, policy, layout=layout)

    assert brief.kept == Parts(**kept_by_part(tape))
    if mtp is None:  # else embedding and head are used twice, in one tape
        assert sum(brief.fullest) == sum(fullest_instant(tape).values())


@pytest.mark.parametrize("name", ["small", "dense", "gqa", "vocabulary"])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_model_in_brief_has_the_sums_of_its_tape(name, has_gradients):
    gqa = GQAConfig(n_heads=4, n_kv_heads=2, head_dim=16)
    cfg = {
        "small": replace(PRESETS["small"], mtp=None),
        "dense": replace(TINY, moe=None, mtp=None),
        "gqa": replace(TINY, attention=gqa, mtp=None),
        "vocabulary": replace(TINY, vocab_size=5000, mtp=None),
    }[name]
    step = Pass(batch=2, seq_len=64, compute=torch.bfloat16)
    tape = model_tape(cfg, step)
    brief = price(cfg, step, whole(cfg), has_gradients=has_gradients)
    targets = 2 * 64 * 8  # which the loss copies

    assert sum(brief.kept) - targets == sum(kept_by_part(tape).values())
    full = fullest_instant(tape, has_gradients=has_gradients)
    assert 0 <= sum(brief.fullest) - sum(full.values()) <= targets


def test_chunks_keep_together_what_the_model_keeps():
    step = Pass(batch=1, seq_len=4096, device="gpu")
    chunks = [
        Chunk(layers=range(0, 20), is_first=True),
        Chunk(layers=range(20, 61), is_last=True),
    ]
    kept = sum(sum(price(V3, step, chunk).kept) for chunk in chunks)
    turns = 4096 * 32 * 8  # of each chunk

    assert kept - turns == sum(kept_by_part(model_tape(V3, step)).values())


def test_a_rank_keeps_its_part():
    step, chunk = Pass(batch=1, seq_len=4096, device="gpu"), Chunk(layers=range(20, 24))
    all_of_it = sum(price(V3, step, chunk).kept)
    part = sum(price(V3, step, chunk, layout=Layout(tp=4)).kept)

    assert all_of_it / 4 < part < all_of_it / 3


@pytest.mark.parametrize("policy", [*RECOMPUTE_POLICIES, MIXED], ids=str)
def test_chunks_hold_the_copies_of_weights_that_their_tape_makes_again(policy):
    cfg = replace(TINY, n_layers=6)
    step = Pass(batch=1, seq_len=64, compute=torch.bfloat16)
    tape = replay_tape(cfg, step, policy)
    prices = ChunkPrices(
        cfg=cfg,
        step=step,
        layout=Layout(),
        policies=block_policies(policy, cfg.n_layers + cfg.n_mtp),
        has_gradients=False,
        has_buffer=False,
    )

    assert prices.of(whole(cfg)).casts == rebuilt_casts(tape)
    assert (rebuilt_casts(tape) > 0) == (policy != "none")


def chunk_price(kept: int, fullest: int, gradients: int) -> ChunkPrice:
    parts = Parts(activations=kept)
    peak = Parts(activations=kept, temporaries=fullest - kept)
    return ChunkPrice(Segment.of(parts, parts, peak, gradients), [])


def test_one_chunk_runs_backward_while_the_others_wait():
    prices = [chunk_price(10, 17, 5), chunk_price(20, 21, 6)]
    kept, played = at_once(prices, (3, 2), 11)

    assert kept == Parts(activations=3 * 10 + 2 * 20)
    # The first: 70 kept and 7 more, beside the second's gradients.
    assert played == Parts(activations=70, temporaries=7, gradients=6)


def test_a_chunk_that_keeps_nothing_runs_no_backward():
    prices = [chunk_price(10, 11, 0), chunk_price(20, 90, 0)]

    assert at_once(prices, (1, 0), 0)[1] == Parts(activations=10, temporaries=1)
