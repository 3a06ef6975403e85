import pytest
import torch

from labkit.training import speed
from labkit.training.windows import Windows


@pytest.fixture
def batch(corpus):
    return Windows(corpus.train, 16).take(0, 2)


@pytest.mark.parametrize(("fp32", "bf16"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_precision_with_the_shorter_step_is_chosen(
    make_model, batch, monkeypatch, fp32, bf16
):
    seconds = {torch.float32: fp32, torch.bfloat16: bf16}
    monkeypatch.setattr(speed, "step_seconds", lambda *_, dtype: seconds[dtype])
    expected = "fp32" if fp32 < bf16 else "bf16"
    assert speed.faster_precision(make_model(), batch) == expected


def test_timing_a_step_leaves_weights_and_gradients_as_they_were(make_model, batch):
    model, untouched = make_model(), make_model()
    assert 0 < speed.step_seconds(model, batch, dtype=torch.float32, n_trials=1) < 60
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert ours.grad is None and torch.equal(ours, theirs)


def test_fp8_which_is_bf16_with_more_work_is_never_timed(
    make_model, batch, monkeypatch
):
    seconds = iter((3.0, 2.0, 1.0))
    monkeypatch.setattr(speed, "step_seconds", lambda *_, **__: next(seconds))
    assert speed.faster_precision(make_model(), batch) == "bf16"
