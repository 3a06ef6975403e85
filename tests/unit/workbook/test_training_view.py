"""A live run: what is shown, how it is stopped, that nothing learned is lost."""

import asyncio
import signal

import pytest
import torch

from labkit.config import PRESETS, TrainConfig
from labkit.model import Transformer
from labkit.training import Trainer, corpus
from labkit.workbook.widgets.training import TrainingView, live_training


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other when the machine is busy, and steps are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trainer(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        text = f"{number} is not {number + 1}. " * 40
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    text = corpus.from_folder(folder, cache=tmp_path)
    recipe = TrainConfig(n_steps=4, global_batch=2, micro_batch=2, seq_len=16)
    return Trainer(Transformer(PRESETS["tiny"]), recipe, text)


@pytest.fixture
def outputs(monkeypatch):
    shown = []
    monkeypatch.setattr("labkit.workbook.widgets.training.show", shown.append)
    return shown


def test_a_run_ends_with_its_curve_and_a_line_without_numbers_that_vary(
    trainer, outputs
):
    records = asyncio.run(live_training(trainer, 3, caption="Tiny."))

    assert [record.step for record in records] == [1, 2, 3]
    start, end = outputs
    assert start.text == "Training for 3 steps"
    assert end.text == "Trained 3 of 3 steps."
    assert end.varies
    assert 'alt="next-token loss over 3 training steps"' in end.html
    assert '<data class="varies">Loss 5.' in end.html


def stop_after(trainer, n_steps, stop):
    """Make the trainer call `stop` during its n-th step."""
    step = trainer.step

    def stepping():
        if trainer.n_steps_done + 1 == n_steps:
            stop()
        return step()

    trainer.step = stepping


def test_an_interrupt_ends_the_run_after_the_step_and_keeps_it(trainer, outputs):
    stop_after(trainer, 2, lambda: signal.raise_signal(signal.SIGINT))
    records = asyncio.run(live_training(trainer, 4))

    assert len(records) == trainer.n_steps_done == 2
    assert outputs[-1].text == ("Stopped after 2 of 4 steps; what was learned is kept.")


def test_the_stop_button_ends_the_run_and_calling_again_goes_on(
    trainer, outputs, monkeypatch
):
    views = []
    init = TrainingView.__init__
    monkeypatch.setattr(
        TrainingView,
        "__init__",
        lambda self, n_steps: (init(self, n_steps), views.append(self))[0],
    )
    stop_after(trainer, 1, lambda: views[0].stop_button.click())
    assert len(asyncio.run(live_training(trainer, 4))) == 1
    records = asyncio.run(live_training(trainer, 3))

    assert [record.step for record in records] == [2, 3, 4]


def test_an_error_in_a_step_is_not_swallowed(trainer, outputs):
    def broken():
        raise RuntimeError("no memory left")

    stop_after(trainer, 2, broken)
    with pytest.raises(RuntimeError, match="no memory left"):
        asyncio.run(live_training(trainer, 4))


def test_a_run_of_no_steps_says_so(trainer, outputs):
    assert asyncio.run(live_training(trainer, 0)) == []
    assert outputs[-1].text == "Trained 0 of 0 steps."
