"""The parts of a notebook in a real JupyterLab: guesses, widgets, checks, training."""

import re

import pytest
from playwright.sync_api import expect

from labkit.workbook.runner import execute, save

SETUP = """import time
from pathlib import Path
import torch
from labkit.config import PRESETS, TrainConfig
from labkit.model import Transformer
from labkit.training import Trainer, corpus
from labkit.workbook import exercise, figures, lab, widgets
from labkit.workbook.widgets.training import live_training"""

GUESS = """guess = lab.guess("bytes that one token keeps", unit="bytes")
choice = lab.guess("what limits decoding", choices=("compute", "memory"))"""

REVEAL = "lab.reveal(guess, 70272)"

EXPLORE = """def draw(rank, context, model, causal):
    parts = [figures.Part(name=model, amount=float(rank), meaning="cache")]
    return figures.bars(parts, title="The latent is the cache", x="values per token")

def describe(rank, context, model, causal):
    if rank == 1024:
        raise ValueError("rank must be below 1024; got 1024. Move it back.")
    return f"{model}: {rank + 64} values, {context} tokens, causal {causal}"

widgets.explore(
    draw, describe, caption="Move the controls.",
    rank=widgets.slider("latent rank", (64, 1024), value=896, step=64, unit="values"),
    context=widgets.steps("context", [1024, 2048], value=1024, unit="tokens"),
    model=widgets.choice("model", ["MLA", "GQA"]),
    causal=widgets.switch("causal"))"""

EXERCISE = """ex = exercise("gibibytes")
ex.check(None)
ex.hint()"""

EXPERIMENT = """def work(n):
    for i in range(n):
        time.sleep(0.1)
        yield (i + 1) / n, i + 1

def draw_result(i):
    parts = [figures.Part(name="steps", amount=float(i))]
    return figures.bars(parts, title="Steps so far", x="steps")

widgets.experiment(work, draw_result, lambda i: f"{i} steps done",
                   caption="Counts slowly.",
                   n=widgets.slider("steps", (10, 1000), value=1000, unit="steps"))"""

TRAIN = """torch.set_num_threads(1)
text = corpus.from_folder(Path("text"))
recipe = TrainConfig(n_steps=2000, seq_len=64)
trainer = Trainer(Transformer(PRESETS["tiny"]), recipe, text)
records = await live_training(trainer, 2000, caption="tiny on text")"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory, notebook_of):
    path = tmp_path_factory.mktemp("parts") / "parts.ipynb"
    notebook_of(path, SETUP, GUESS, REVEAL, EXPLORE, EXERCISE, EXPERIMENT)
    save(execute(path))
    return path


def test_guess_explore_check_and_experiment_answer(parts, open_notebook):
    lab = open_notebook(parts)
    assert lab.stored_figures() == ["MLA: 960 values, 1024 tokens, causal False"]
    lab.screenshot_sections("-stored")
    lab.run_all()
    expect(lab.page.locator(".Toastify__toast")).to_have_count(0)
    assert [error for _, error in lab.cells()] == [""] * 6
    lab.screenshot_sections("-start")

    guess_and_reveal(lab)
    move_every_control(lab)
    check_an_exercise(lab)
    run_and_stop_an_experiment(lab)
    assert lab.errors == []


def guess_and_reveal(lab):
    """Enter a guess: the revealed line follows without running anything."""
    reveal = lab.panel.get_by_role("status").filter(has_text="70,272 bytes")
    expect(reveal).to_contain_text("○ no guess yet")
    box = lab.panel.get_by_placeholder("a number")
    box.fill("4,997,120")
    box.press("Enter")
    expect(reveal).to_contain_text("you said 4,997,120 bytes, it is 70,272 bytes")


def move_every_control(lab):
    """Each control changes the sentence and the alt text; an error is told."""
    bundle = lab.panel.locator(".labkit-explore")
    status = bundle.get_by_role("status")
    expect(status).to_have_text("MLA: 960 values, 1024 tokens, causal False")
    sliders = bundle.get_by_role("slider")
    lab.change_by_keyboard(sliders.nth(1))
    expect(status).to_contain_text("2048 tokens")
    lab.change_by_keyboard(bundle.get_by_role("radio", name="GQA"))
    expect(status).to_contain_text("GQA")
    lab.change_by_keyboard(bundle.get_by_role("checkbox"))
    expect(status).to_contain_text("causal True")
    lab.change_by_keyboard(sliders.nth(0))
    expect(status).to_have_text("GQA: 1024 values, 2048 tokens, causal True")
    expect(bundle.get_by_role("img", name="GQA: 1024 values")).to_be_visible()
    lab.change_by_keyboard(sliders.nth(0))
    expect(status).to_contain_text("✗ rank must be below 1024; got 1024.")
    lab.screenshot("-explore", of=bundle)


def check_an_exercise(lab):
    """A right answer typed into a cell gets its tick, a wrong one its reason."""
    answer = lab.run_code("ex.check(lambda n_bytes: n_bytes / 2**30)")
    expect(answer).to_contain_text("✓ 3/3")
    answer = lab.run_code("ex.check(lambda n_bytes: n_bytes / 1e9)")
    expect(answer).to_contain_text("that is GB: GiB count 1024³")


def run_and_stop_an_experiment(lab):
    """Run shows results as they come; Stop keeps the last; other cells can run."""
    bench = lab.panel.locator(".labkit-experiment")
    status = bench.get_by_role("status")
    bench.get_by_role("button", name="Run").click()
    expect(status).to_have_text(re.compile(r"^\d+ steps done$"))
    expect(lab.run_code("6 * 7")).to_have_text("42")
    bench.get_by_role("button", name="Stop").click()
    expect(status).to_have_text(re.compile(r"^stopped: \d+ steps done$"))
    expect(bench.get_by_role("button", name="Run")).to_be_enabled()


@pytest.fixture
def training(tmp_path, server, notebook_of):
    text = server.folder / "text"
    text.mkdir(exist_ok=True)
    for number in range(40):
        (text / f"{number}.txt").write_text(f"{number} is not {number + 1}. " * 400)
    return notebook_of(
        tmp_path / "training.ipynb", SETUP, TRAIN, "len(records), trainer.n_steps_done"
    )


def test_a_run_shows_its_loss_and_ends_at_stop_with_all_it_learned(
    training, open_notebook
):
    lab = open_notebook(training)
    lab.start_all()
    view = lab.panel.locator(".labkit-training")
    status = view.get_by_role("status")
    expect(status).to_have_text(
        re.compile(r"step \d+ of 2,000 · loss \d"), timeout=60_000
    )
    lab.screenshot("-live", of=view)
    view.get_by_role("button", name="Stop").click()
    lab.await_end(30)

    assert [error for _, error in lab.cells()] == ["", "", ""]
    expect(lab.panel.get_by_text("what was learned is kept")).to_be_visible()
    counts = lab.panel.locator(".jp-OutputArea-executeResult").last.inner_text()
    done, kept = map(int, re.findall(r"\d+", counts)[-2:])
    assert 0 < done == kept < 2000
    lab.screenshot_sections("-stopped")
    interrupt_the_kernel_instead(lab, kept)


def interrupt_the_kernel_instead(lab, n_before):
    """Train on, and end with the kernel's own interrupt: nothing is lost either."""
    lab.start_code("records = await live_training(trainer, 2000)")
    view = lab.panel.locator(".labkit-training").last
    expect(view.get_by_role("status")).to_contain_text("· loss", timeout=30_000)
    lab.do("await window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    lab.await_end(30)
    answer = lab.run_code(f"len(records) + {n_before} == trainer.n_steps_done < 2000")
    expect(answer).to_have_text("True")
