import pytest
import torch

from labkit.model.transformer import IGNORED
from labkit.training.accumulation import LossScale, accumulate
from labkit.training.windows import Batch


@pytest.fixture
def batch() -> Batch:
    """Six sequences; most targets of the first two are ignored."""
    text = torch.randint(256, (6, 13))
    targets = text[:, 1:].clone()
    targets[0] = IGNORED
    targets[1, 2:] = IGNORED
    return Batch(text[:, :-1], targets)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def scale_of(batch: Batch) -> LossScale:
    return LossScale(
        n_tokens=batch.n_targets, n_sequences=batch.n_sequences, mtp_weight=0.2
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up_to_the_gradient_of_the_large_batch(
    make_model, batch, size
):
    whole, parts = make_model(), make_model()
    loss = whole.loss(batch.tokens, batch.targets, mtp_weight=0.2)
    loss.total.backward()
    summed = accumulate(parts, batch.split(size), scale_of(batch))

    expected = gradients(whole)
    for name, gradient in gradients(parts).items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-7, msg=name
        )
    expected = torch.stack([loss.total, loss.main, loss.mtp, loss.balance]).detach()
    torch.testing.assert_close(summed.parts, expected)
    assert torch.equal(summed.load, loss.load)


def test_a_mean_of_means_would_be_another_gradient(make_model, batch):
    ours, naive = make_model(), make_model()
    accumulate(ours, batch.split(2), scale_of(batch))
    for part in batch.split(2):
        (naive.loss(part.tokens, part.targets, mtp_weight=0.2).total / 3).backward()
    difference = ours.head.weight.grad - naive.head.weight.grad
    assert difference.norm() > 0.1 * ours.head.weight.grad.norm()


def test_the_load_counts_every_token_once_per_activated_expert(make_model, batch):
    load = accumulate(make_model(), batch.split(4), scale_of(batch)).load
    assert load.shape == (2, 4)  # one sparse layer and one MTP module
    assert load[0].sum() == batch.tokens.numel() * 2


def test_bf16_computes_products_in_bf16_and_keeps_weights_and_gradients(
    make_model, batch
):
    model = make_model()
    seen = []
    model.head.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    accumulate(model, [batch], scale_of(batch), dtype=torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
