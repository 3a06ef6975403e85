"""Models and a watched run, as several tests need them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from torch import nn

from labkit.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from labkit.memory.leaks import LeakReport, LeakWatch

N_STEPS = 9

MLA = MLAConfig(
    n_heads=2,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
)
DENSE = ModelConfig(
    vocab_size=32,
    dim=16,
    n_layers=2,
    inter_dim=24,
    attention=MLA,
    max_seq_len=300,
    init_std=0.1,
)
MOE = MoEConfig(
    n_routed_experts=4,
    n_activated_experts=2,
    moe_inter_dim=8,
    balance_loss_weight=1e-2,
)
SPARSE = replace(DENSE, moe=MOE, n_dense_layers=1)
SMALL_MODELS = {
    "dense": DENSE,
    "sparse": SPARSE,
    "no shared experts": replace(SPARSE, moe=replace(MOE, n_shared_experts=0)),
    "no query rank": replace(SPARSE, attention=replace(MLA, q_lora_rank=None)),
    "multi-token": replace(SPARSE, mtp=MTPConfig(depth=2)),
    "grouped-query": replace(
        SPARSE, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=8)
    ),
}
"""The kinds of parts that a recompute policy tells apart. All but "dense" have a dense
layer before one of experts."""


@pytest.fixture(scope="session")
def small_models() -> Mapping[str, ModelConfig]:
    """Return the smallest models of each kind, by name."""
    return SMALL_MODELS


@pytest.fixture(scope="session")
def dense() -> ModelConfig:
    """Return the one without experts, whose attention is MLA."""
    return DENSE


@pytest.fixture(scope="session")
def sparse() -> ModelConfig:
    """Return the same with experts in its second layer."""
    return SPARSE


@pytest.fixture(scope="session", params=SMALL_MODELS)
def small_model(request: pytest.FixtureRequest) -> ModelConfig:
    """Return each of them in turn."""
    return SMALL_MODELS[request.param]


@pytest.fixture
def watch() -> Callable[[nn.Module, Callable[[], object]], LeakReport]:
    """Return a function that runs a step often enough, and tells what grew."""

    def run(model: nn.Module, step: Callable[[], object]) -> LeakReport:
        with LeakWatch(model) as leak_watch:
            for _ in range(N_STEPS):
                step()
                leak_watch.end_step()
        return leak_watch.report()

    return run
