"""Runs whose memory does not grow are not accused, whatever their habits."""

import random
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import nn

from labkit.config import PRESETS, GQAConfig, MLAConfig, ModelConfig, MoEConfig
from labkit.model import LatentCache, Transformer, generate


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn_config(draw: random.Random) -> ModelConfig:
    mla = MLAConfig(
        n_heads=2,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
    )
    moe = MoEConfig(n_routed_experts=4, n_activated_experts=2, moe_inter_dim=8)
    n_layers, is_dense = draw.choice([1, 2]), draw.random() < 0.5
    return replace(
        PRESETS["tiny"],
        dim=16,
        n_layers=n_layers,
        n_dense_layers=n_layers if is_dense else 0,
        inter_dim=16,
        attention=draw.choice([mla, GQAConfig(n_heads=2, n_kv_heads=1, head_dim=8)]),
        moe=None if is_dense else moe,
        mtp=draw.choice([None, PRESETS["tiny"].mtp]),
    )


class CleanRun:
    """A training loop with habits that keep memory, but never more and more."""

    HABITS = ("last", "window", "best", "average", "generate", "two", "mixed", "filled")

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.cfg = drawn_config(draw)
        self.model = Transformer(
            self.cfg, generator=torch.Generator().manual_seed(seed)
        )
        weights = list(self.model.parameters())
        adamw = torch.optim.AdamW(weights, fused=True)
        sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
        self.optimizer = draw.choice([adamw, sgd])
        self.habits = {habit for habit in self.HABITS if draw.random() < 0.4}
        self.losses, self.recent, self.kept = [], deque(maxlen=4), {}

    def step(self) -> None:
        is_mixed = "mixed" in self.habits
        for _ in range(2 if "two" in self.habits else 1):
            shape = self.draw.choice([1, 2]), self.draw.randint(4, 12)
            tokens = torch.randint(256, shape)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                parts = self.model.loss(tokens, tokens)
            parts.total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none="filled" not in self.habits)
        self.losses.append(parts.total.item())
        if "last" in self.habits:
            self.kept["last"] = parts
        if "window" in self.habits:
            self.recent.append(parts.load)
        self.keep_weights()
        if "generate" in self.habits and len(self.losses) % 3 == 0:
            cache = LatentCache(self.cfg, 1, 16)
            generate(self.model, torch.zeros(1, 3, dtype=torch.int64), 3, cache=cache)

    def keep_weights(self) -> None:
        if "best" in self.habits and self.losses[-1] == min(self.losses):
            state = self.model.state_dict()
            self.kept["best"] = {name: value.clone() for name, value in state.items()}
        if "average" in self.habits:
            weight = self.model.head.weight.detach()
            average = self.kept.get("average", weight)
            self.kept["average"] = average.lerp(weight, 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # they take minutes otherwise
def test_a_hundred_clean_runs_are_not_accused(watch):
    accused = {}
    for seed in range(100):
        run = CleanRun(seed)
        report = watch(run.model, run.step)
        if report.leaks:
            accused[seed] = str(report)

    assert accused == {}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("unchecked")  # they take minutes otherwise
def test_the_same_runs_with_a_leak_are_accused(seed, watch):
    run, kept = CleanRun(seed), []

    def step() -> None:
        run.step()
        kept.append(run.model.embed(torch.zeros(1, 2, dtype=torch.int64)))

    report = watch(run.model, step)

    assert [leak.holder for leak in report.leaks] == [
        "`kept` in test_the_same_runs_with_a_leak_are_accused()"
    ]
