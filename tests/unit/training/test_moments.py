"""Moments in BF16: their rounding, where they stall, and what they cost."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import Layout, TrainConfig
from labkit.config.train import LARGEST_BF16_BETA
from labkit.memory.measure import measure
from labkit.memory.persistent import States, persistent
from labkit.model import Transformer
from labkit.training import Trainer, read_checkpoint
from labkit.training.checkpoint import gather_tensors, scatter_tensors
from labkit.training.optimizer import (
    BATCH,
    MOMENTS,
    BF16AdamW,
    build_optimizer,
    round_stochastically,
)

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
SENTENCE = b"the quick brown fox jumps over the lazy dog; " * 2
NARROW = ("bf16", "bf16-stochastic")


def parameters_of(*sizes: int, seed: int = 0) -> list[torch.nn.Parameter]:
    """Return vectors of normal values, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for size in sizes:
        values, gradient = torch.randn(2, size, generator=generator)
        parameters.append(torch.nn.Parameter(values.clone()))
        parameters[-1].grad = gradient.clone()
    return parameters


def numbers_of_an_octave() -> torch.Tensor:
    """Return the 128 BF16 numbers from 1 up to 2."""
    return (torch.arange(128, 256) / 128).bfloat16()


def without_gradient(moments: torch.Tensor, beta: float, **options) -> dict:
    """Return both moments after a step from these, whose gradients are 0."""
    weight = torch.nn.Parameter(torch.zeros(len(moments)))
    weight.grad = torch.zeros_like(weight)
    optimizer = BF16AdamW([weight], betas=(beta, beta), fused=True, **options)
    kept = {key: moments.clone() for key in MOMENTS}
    optimizer.state[weight] = {"step": torch.ones(()), **kept}
    optimizer.step()
    return kept


def test_moments_of_the_first_step_are_the_rounded_shares_of_the_gradient():
    (weight,) = parameters_of(1)
    weight.grad.fill_(3.0)
    optimizer = BF16AdamW([weight], seed=None, **OPTIONS)
    optimizer.step()
    state = optimizer.state[weight]
    # 0.1 * 3 and 0.05 * 9, between 77/256 and 76/256, and 116/256 and 115/256.
    assert state["exp_avg"].item() == 77 / 256
    assert state["exp_avg_sq"].item() == 115 / 256
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert state["step"].item() == 1


def test_an_update_is_that_of_adamw_for_the_same_moments_bit_for_bit():
    sizes = (5, BATCH + 5, 1, 300)  # a batch of three, one cut in two
    ours, theirs = parameters_of(*sizes), parameters_of(*sizes)
    narrow = BF16AdamW(ours, seed=None, **OPTIONS)
    wide = torch.optim.AdamW(theirs, **OPTIONS)
    for _ in range(3):
        narrow.step()
        wide.step()
        for state in wide.state.values():
            for key in MOMENTS:
                state[key] = state[key].bfloat16().float()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        for key in MOMENTS:
            kept = narrow.state[one][key]
            assert torch.equal(kept.float(), wide.state[other][key])


def test_moments_in_fp32_are_left_to_pytorch(make_model, train_config):
    assert type(build_optimizer(make_model(), train_config)) is torch.optim.AdamW


def test_up_to_257_by_258_every_rounded_moment_falls_and_beyond_it_129_stays():
    numbers = numbers_of_an_octave()
    at, beyond = LARGEST_BF16_BETA, LARGEST_BF16_BETA + 1e-6
    for scale in (1.0, 2.0**-100, 2.0**100):
        for after in without_gradient(scale * numbers, at, seed=None).values():
            assert (after < scale * numbers).all()
        for after in without_gradient(scale * numbers, beyond, seed=None).values():
            stays = after == scale * numbers
            assert stays.nonzero().flatten().tolist() == [1]


def test_a_second_moment_of_0_999_stays_for_ever_and_falls_by_chance():
    ones = torch.ones(2**14).bfloat16()
    assert (without_gradient(ones, 0.999, seed=None)["exp_avg_sq"] == 1).all()

    moments = ones
    for seed in range(100):
        moments = without_gradient(moments, 0.999, seed=seed)["exp_avg_sq"]
    # The deviation of one after so many steps is about 0.015.
    assert moments.float().mean().item() == pytest.approx(0.999**100, abs=1e-3)


@given(
    value=st.floats(2.0**-100, 2.0**100, width=32) | st.floats(-4, 4, width=32),
    seed=st.integers(0, 2**64 - 1),
)
def test_stochastic_rounding_gives_a_neighbour_and_keeps_bf16_numbers(value, seed):
    x = torch.tensor([value, value]).float()
    x[1] = x[1].bfloat16()
    below = (x.view(torch.int32) & -0x10000).view(torch.float32)  # towards zero
    above = ((x.view(torch.int32) | 0xFFFF) + 1).view(torch.float32)
    rounded = x.clone()
    round_stochastically(rounded, torch.Generator().manual_seed(seed))
    assert rounded[0] in (below[0], above[0])
    assert rounded[1] == x[1]
    assert torch.equal(rounded, rounded.bfloat16().float())


@pytest.mark.parametrize("share", [1 / 65536, 0.1, 0.5, 0.9, 65535 / 65536])
@pytest.mark.parametrize("low", [1.0, -3.0, 2.0**-20])
def test_stochastic_rounding_is_right_on_average(low, share):
    step = math.copysign(2.0 ** (math.floor(math.log2(abs(low))) - 7), low)
    n = 2**20
    x = torch.full((n,), low + share * step)
    true_share = (x[0].double().item() - low) / step
    round_stochastically(x, torch.Generator().manual_seed(0))
    found = ((x.double() - low) / step).mean().item()
    deviation = math.sqrt(true_share * (1 - true_share) / n)
    assert abs(found - true_share) < 4 * deviation


def test_stochastic_rounding_of_neighbours_is_independent():
    x = torch.full((2**18,), 1 + 2**-8)
    round_stochastically(x, torch.Generator().manual_seed(0))
    sign = (x > 1) * 2.0 - 1
    for shift in (1, 2, 3, 4):  # four come from one draw
        correlation = (sign[shift:] * sign[:-shift]).mean().item()
        assert abs(correlation) < 4 / math.sqrt(len(x))


def test_what_is_not_finite_stays_so():
    x = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])
    round_stochastically(x, torch.Generator().manual_seed(0))
    assert x[:2].tolist() == [math.inf, -math.inf]
    assert x[2:].isnan().all()


def test_rounding_depends_on_the_seed_and_the_step_alone():
    def kept_after(seed: int, n_steps: int) -> torch.Tensor:
        (weight,) = parameters_of(64)
        optimizer = BF16AdamW([weight], seed=seed, **OPTIONS)
        start = {key: torch.ones(64).bfloat16() for key in MOMENTS}
        optimizer.state[weight] = {"step": torch.tensor(float(n_steps)), **start}
        torch.randn(3)  # the global generator takes no part
        optimizer.step()
        return optimizer.state[weight]["exp_avg_sq"]

    assert torch.equal(kept_after(2**63 - 1, 7), kept_after(2**63 - 1, 7))
    assert not torch.equal(kept_after(0, 7), kept_after(0, 8))
    assert not torch.equal(kept_after(0, 7), kept_after(1, 7))


def test_a_parameter_without_gradient_is_left_alone():
    first, second = parameters_of(3, 3)
    first.grad = None
    before = first.detach().clone()
    optimizer = BF16AdamW([first, second], seed=0, **OPTIONS)
    optimizer.step()
    assert torch.equal(first, before)
    assert set(optimizer.state) == {second}


def test_weights_that_are_not_in_fp32_are_refused(make_model, train_config):
    model = make_model().bfloat16()
    with pytest.raises(ValueError) as caught:
        build_optimizer(model, replace(train_config, moments="bf16"))
    assert str(caught.value) == (
        "moments='bf16' needs weights in FP32, which they are widened to; got "
        "torch.bfloat16. Build the model with dtype=torch.float32, or set "
        "moments='fp32'."
    )


def test_state_that_pytorch_loads_stays_in_bf16():
    (weight,) = parameters_of(100)
    optimizer = BF16AdamW([weight], seed=None, **OPTIONS)
    optimizer.step()
    before = {key: optimizer.state[weight][key].clone() for key in MOMENTS}
    optimizer.load_state_dict(optimizer.state_dict())
    for key in MOMENTS:
        after = optimizer.state[weight][key]
        assert after.dtype == torch.bfloat16 and torch.equal(after, before[key])


@pytest.mark.parametrize("moments", NARROW)
def test_the_state_takes_four_bytes_a_parameter_and_four_a_tensor(
    make_model, train_config, moments
):
    model = make_model()
    optimizer = build_optimizer(model, replace(train_config, moments=moments))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model.loss(tokens, tokens).total.backward()
    optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values()]
    n_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept)

    parameters = list(model.parameters())
    n_parameters = sum(parameter.numel() for parameter in parameters)
    assert n_bytes == 2 * 2 * n_parameters + 4 * len(parameters)
    assert (
        n_bytes
        == persistent(model.cfg, Layout(), states=States(moments="bfloat16"))["moments"]
    )


@pytest.mark.parametrize(
    ("moments", "by_value"),
    [
        ("bf16", 2 * (2 + 4)),  # both moments, side by side and widened
        ("bf16-stochastic", 2 * (4 + 2 + 4)),  # widened, drawn, and dithers of 32 bits
    ],
)
def test_an_update_widens_a_batch_of_moments_at_a_time(moments, by_value, train_config):
    model = torch.nn.Linear(1024, 8 * BATCH // 1024, bias=False)
    optimizer = build_optimizer(model, replace(train_config, moments=moments))

    def step() -> None:
        model(torch.ones(1024)).sum().backward()
        optimizer.step()

    step()
    model.weight.grad = None
    report = measure(step, model, optimizer)
    (during,) = [i for i in report.timeline if i.name == "optimizer"]
    assert during.by_part["temporaries"] == by_value * BATCH


@pytest.mark.parametrize("moments", NARROW)
def test_a_resumed_run_repeats_bit_for_bit(
    make_model, train_config, corpus, tmp_path, moments
):
    train = replace(train_config, moments=moments, n_steps=4, micro_batch=4)
    whole = Trainer(make_model(), train, corpus)
    records = whole.run(progress=False)
    first = Trainer(make_model(), train, corpus, run_dir=tmp_path / "run")
    first.run(2, progress=False)
    saved = read_checkpoint(tmp_path / "run").tensors
    assert saved["optimizer.exp_avg.norm.weight"].dtype == torch.bfloat16

    rest = Trainer.resume(tmp_path / "run", corpus=corpus)
    again = rest.run(progress=False)
    assert [r.loss for r in again] == [r.loss for r in records[2:]]
    ours, theirs = (gather_tensors(t.model, t.optimizer) for t in (whole, rest))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_before_the_first_step_holds_zeros_in_bf16(
    make_model, train_config
):
    model = make_model()
    optimizer = build_optimizer(model, replace(train_config, moments="bf16"))
    tensors = gather_tensors(model, optimizer)
    assert tensors["optimizer.exp_avg.head.weight"].dtype == torch.bfloat16
    scatter_tensors(tensors, model, optimizer)
    kept = optimizer.state[model.head.weight]["exp_avg_sq"]
    assert kept.dtype == torch.bfloat16 and not kept.any()


def losses_of_fifty_steps(model: Transformer, train: TrainConfig) -> list[float]:
    """Train on one batch of a repeating text and return the losses."""
    optimizer = build_optimizer(model, train)
    text = torch.frombuffer(bytearray(SENTENCE), dtype=torch.uint8).long()
    tokens, targets = text[:68].view(4, 17).split((16, 1), dim=1)
    targets = torch.cat((tokens[:, 1:], targets), dim=1)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = model.loss(tokens, targets).total
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_fifty_steps_learn_as_much_as_with_moments_in_fp32(make_model, train_config):
    cfg = replace(make_model().cfg, moe=None, mtp=None)
    runs = {}
    for moments in ("fp32", *NARROW):
        model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
        train = replace(train_config, moments=moments)
        runs[moments] = losses_of_fifty_steps(model, train)
    for moments in NARROW:
        pairs = zip(runs["fp32"], runs[moments], strict=True)
        assert 0 < max(abs(wide - narrow) for wide, narrow in pairs) < 0.01
    assert runs["fp32"][0] > 5.5 and runs["fp32"][-1] < 0.2
