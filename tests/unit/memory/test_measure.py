"""Measured steps: by hand, against autograd's hooks and PyTorch's tracker, on fakes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from labkit.config import PRESETS, GQAConfig, ModelConfig, MoEConfig, TrainConfig
from labkit.memory.fakes import faked
from labkit.memory.measure import measure
from labkit.memory.report import MemoryReport
from labkit.model import Transformer
from labkit.model.moe import MoE
from labkit.training import Trainer, corpus

TINY = replace(PRESETS["tiny"], n_layers=2)
DENSE = replace(TINY, moe=None, n_dense_layers=2, mtp=None)
GQA = replace(TINY, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=16))
SHAPE = (2, 24)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Training:
    """A model, its optimizer, and one step of both."""

    def __init__(self, cfg: ModelConfig, *, dtype=torch.float32, n_micro_batches=1):
        self.model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.dtype, self.n_micro_batches = dtype, n_micro_batches
        self.tokens = torch.randint(256, SHAPE)

    def forward(self):
        is_mixed = self.dtype != torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
            n_tokens = self.tokens.numel()
            return self.model.loss(self.tokens, self.tokens, n_tokens=n_tokens).total

    def step(self) -> None:
        for _ in range(self.n_micro_batches):
            self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def state_of(report: MemoryReport, name: str) -> dict[str, int]:
    return next(dict(i.by_part) for i in report.timeline if i.name == name)


def test_two_layers_by_hand():
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    batch = torch.ones(16, 8)

    def step() -> None:
        model(batch).square().sum().backward()
        optimizer.step()

    first, second = measure(step, model), measure(step, model)

    n_bytes = 4 * (8 * 4 + 4 * 2)
    assert state_of(first, "start") == {"weights": n_bytes}
    assert state_of(first, "end of forward") == {
        "weights": n_bytes,
        "activations": 4 * 16 * (4 + 2),  # the second layer's input, the square's
        "temporaries": 4 + 4,  # the loss and its gradient, 1
    }
    assert first.by_module == {"1": 4 * 16 * 4, "loss": 4 * 16 * 2}
    full = {part: n_bytes for part in ("weights", "gradients", "moments")}
    assert state_of(first, "end") == full
    assert state_of(second, "start") == full


@pytest.mark.parametrize("cfg", [TINY, GQA], ids=["mla-moe-mtp", "gqa"])
def test_what_lasts_is_exact_to_the_byte(cfg):
    training = Training(cfg)
    report = measure(training.step, training.model)

    weights = [*training.model.parameters()]
    n_bytes = sum(p.nbytes for p in weights)
    assert report.by_part["weights"] == n_bytes + sum(
        buffer.nbytes for buffer in training.model.buffers()
    )
    assert report.by_part["gradients"] == n_bytes
    # AdamW counts the steps of each tensor in a tensor of its own.
    assert report.by_part["moments"] == 2 * n_bytes + 4 * len(weights)


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Return the bytes of storages that autograd saves, weights left out."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def pack(x):
        kept[x.untyped_storage()._cdata] = x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(
        x.untyped_storage().nbytes() for k, x in kept.items() if k not in weights
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "cfg",
    [TINY, replace(TINY, mtp=None), DENSE, GQA],
    ids=["mla-moe-mtp", "mla-moe", "mla-dense", "gqa-moe-mtp"],
)
def test_activations_are_what_autograd_keeps_but_for_the_batch(cfg, dtype):
    training = Training(cfg, dtype=dtype)
    report = measure(training.step, training.model)
    state = state_of(report, "end of forward")

    expected = saved_bytes(training.forward, training.model) - training.tokens.nbytes
    assert state["activations"] + state["logits"] == expected
    n_logits = SHAPE[0] * sum(SHAPE[1] - depth for depth in range(cfg.n_mtp + 1))
    assert state["logits"] == 4 * cfg.vocab_size * n_logits
    assert sum(report.by_module.values()) == state["activations"]
    assert ("casts" in report.by_module) == (dtype == torch.bfloat16)


def test_the_peak_is_the_one_that_pytorchs_own_tracker_sees():
    training = Training(DENSE)
    training.step()
    report = measure(training.step, training.model)

    tracker = MemTracker()
    tracker.track_external(training.model, training.optimizer)
    with tracker:
        training.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    # It counts the batch, which autograd keeps.
    assert report.peak == peak - training.tokens.nbytes


def test_the_backward_by_way_of_logits_as_wide_as_the_model_is_not_called_logits():
    cfg = replace(DENSE, dim=256)  # the vocabulary's size
    training = Training(cfg)
    report = measure(training.step, training.model)

    logits = 4 * SHAPE[0] * SHAPE[1] * 256
    # Log-probabilities, and the gradients before and after them.
    assert state_of(report, "backward").get("logits", 0) <= 3 * logits
    assert report.by_part["logits"] <= 3 * logits


def test_rows_gathered_for_experts_are_dispatch():
    moe = MoEConfig(n_routed_experts=4, n_activated_experts=2, moe_inter_dim=2)
    model = MoE(16, moe)
    nn.init.normal_(model.experts.w13)
    x = torch.randn(1, 256, 16, requires_grad=True)
    report = measure(lambda: model(x)[0].sum().backward(), model)

    rows = 4 * 256 * 2 * 16
    assert state_of(report, "forward")["dispatch"] == rows
    # The backward gathers gradients besides.
    assert state_of(report, "backward")["dispatch"] == 2 * rows


def test_measuring_changes_no_gradient():
    measured, plain = Training(TINY), Training(TINY)
    measured.tokens = plain.tokens
    measure(lambda: measured.forward().backward(), measured.model)
    plain.forward().backward()

    for one, other in zip(
        measured.model.parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.equal(one.grad, other.grad)


def test_a_second_micro_batch_lives_in_the_place_of_the_first():
    one, two = Training(DENSE), Training(DENSE, n_micro_batches=2)
    single = measure(one.step, one.model)
    double = measure(two.step, two.model)

    first, second = (i for i in double.timeline if i.name == "end of forward")
    assert first.by_part["activations"] == second.by_part["activations"]
    # Gradients of the first are there while the second runs.
    assert "gradients" not in first.by_part
    assert second.by_part["gradients"] == single.by_part["gradients"]
    assert double.by_part["activations"] == single.by_part["activations"]


def test_masters_are_the_optimizers_own_parameters():
    model = nn.Linear(4, 4).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)

    def step() -> None:
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            master.grad = weight.grad.float()
        optimizer.step()

    report = measure(step, model)

    start = {"weights": 2 * 20, "master": 4 * 20}
    assert state_of(report, "start") == start


def test_state_of_an_optimizer_that_the_step_does_not_call_counts_when_given():
    training = Training(DENSE)
    training.step()
    step = training.forward

    assert "moments" not in measure(step, training.model).by_part
    report = measure(step, training.model, training.optimizer)
    assert report.by_part["moments"] > 2 * 4 * DENSE.n_params()


def test_messages_between_ranks_are_communication():
    model = nn.Linear(4, 4, bias=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        message = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(message)

    try:
        report = measure(step, model)
    finally:
        dist.destroy_process_group()

    assert state_of(report, "after backward")["communication"] == 4 * 4 * 4


def test_recompute_shows_as_fewer_activations():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
    )

    def forward(x, *, is_recomputed: bool):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False) if is_recomputed else layer(x)
        return x.sum()

    kept, again = (
        measure(
            lambda r=r: forward(torch.ones(4, 8), is_recomputed=r).backward(), model
        )
        for r in (False, True)
    )

    one = 4 * 8 * 4
    # Results of each tanh, of which the first and second feed a product too.
    assert kept.by_part["activations"] == 3 * one
    # Inputs of the second and third layer.
    assert state_of(again, "end of forward")["activations"] == 2 * one


def test_a_trainers_step_needs_no_more_than_its_model():
    train = TrainConfig(seq_len=16, global_batch=2, micro_batch=1, n_steps=2)
    trainer = Trainer(Transformer(DENSE), train, corpus.standard_library())
    trainer.step()
    report = measure(trainer.step, trainer.model)

    names = [instant.name for instant in report.timeline]
    assert names.count("end of forward") == 2
    assert names[-3:] == ["optimizer", "after optimizer", "end"]
    assert report.by_part["moments"] > 2 * 4 * DENSE.n_params()


def test_fake_tensors_give_the_same_report():
    real = Training(DENSE)
    real.optimizer = torch.optim.AdamW(real.model.parameters(), foreach=False)
    fake = Training(DENSE)
    model = Transformer(DENSE, device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake.model = faked(model)
        fake.optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        fake.tokens = torch.empty(SHAPE, dtype=torch.int64)
        measured = measure(fake.step, model)

    assert measured == measure(real.step, real.model)


def test_on_meta_there_are_sizes_too():
    model = Transformer(TINY, device="meta")
    tokens = torch.empty(SHAPE, dtype=torch.int64, device="meta")
    report = measure(lambda: model.loss(tokens, tokens).total.backward(), model)

    assert report.by_part["gradients"] == sum(p.nbytes for p in model.parameters())
    assert state_of(report, "end of forward")["activations"] > 0


def test_a_failed_step_leaves_no_hook_behind():
    training = Training(DENSE)

    def step() -> None:
        training.forward()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure(step, training.model)

    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in training.model.parameters())
