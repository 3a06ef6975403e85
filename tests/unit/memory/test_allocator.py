"""An allocator is asked where there is one, and only about the step."""

import pytest
import torch
from torch import nn

from labkit.memory import measure
from labkit.memory.allocator import AllocatorPeaks, allocator_peaks


def test_a_cpu_has_no_allocator_to_ask():
    model = nn.Linear(2, 2)
    report = measure(lambda: model(torch.ones(1, 2)).sum().backward(), model)
    assert report.allocator is None


def test_a_model_without_weights_is_measured_too():
    model = nn.ReLU()
    report = measure(lambda: model(torch.ones(1, 2)), model)
    assert report.allocator is None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for CUDA's allocator; return what it was asked, in order."""
    calls: list[str] = []

    def answer(name: str, n_bytes: int | None) -> None:
        def called(device: torch.device) -> int | None:
            calls.append(f"{name} {device}")
            return n_bytes

        monkeypatch.setattr(torch.cuda, name, called)

    answer("reset_peak_memory_stats", None)
    answer("max_memory_allocated", 60)
    answer("max_memory_reserved", 75)
    return calls


def test_a_gpu_is_asked_for_its_peaks_since_the_start(asked):
    with allocator_peaks(torch.device("cuda:0")) as peaks:
        assert asked == ["reset_peak_memory_stats cuda:0"]
        found = peaks()
    assert found == AllocatorPeaks(allocated=60, reserved=75)
    assert found.unused == 15
