"""The leak explorer and its figures: arithmetic by hand, extremes, and speed."""

import time

import pytest

from labkit.config import PRESETS
from labkit.workbook.figures import leaks
from labkit.workbook.figures.charts import Part
from labkit.workbook.figures.export import LIVE_SCALE, png
from labkit.workbook.widgets import leak_watch
from labkit.workbook.widgets.leak_watch import FAULTS, MODELS, LeakPlan


def plan(**changes):
    start = {name: control.value for name, control in leak_watch.controls().items()}
    return start | changes


def test_what_a_fault_keeps_follows_from_the_config():
    kept = LeakPlan(**plan(micro_batch=2, seq_len=1024)).bytes_per_step()

    assert kept[leak_watch.LOGITS] == 2 * 2 * 1024 * 129_280
    # Four layers, each with a latent of 512 and a rotary key of 64, in BF16.
    assert kept[leak_watch.CACHE] == 2 * 1024 * 4 * 576 * 2
    # Three losses of a block each; 4 routers, 256 experts, 8 bytes.
    assert kept[leak_watch.METRICS] == 3 * 512 + 4 * 256 * 8
    assert kept[leak_watch.GRAPH] > 10 * kept[leak_watch.LOGITS]


def test_a_kept_graph_doubles_with_the_micro_batch():
    one, two = (
        LeakPlan(**plan(micro_batch=n)).bytes_per_step()[leak_watch.GRAPH]
        for n in (1, 2)
    )

    assert two == pytest.approx(2 * one, rel=0.01)


def test_steps_are_counted_whole():
    chosen = LeakPlan(**plan(free_gigabytes=1, seq_len=1024))
    size = chosen.bytes_per_step()[leak_watch.CACHE]

    assert size == 4_718_592
    assert chosen.steps_left()[leak_watch.CACHE] == 211  # 10⁹ / 4,718,592 = 211.9


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("batch", "length", "free"), [(1, 1024, 80), (16, 16_384, 1)])
def test_every_corner_of_the_controls_has_a_sentence_and_a_figure(
    model, fault, batch, length, free
):
    corner = plan(
        model=model,
        fault=fault,
        micro_batch=batch,
        seq_len=length,
        free_gigabytes=free,
    )

    text = leak_watch.describe(**corner)
    assert model in text
    assert f"{free} GB free" in text
    assert leak_watch.draw(**corner).axes


def test_sentences_tell_what_fails_at_once_from_what_never_matters():
    big = plan(micro_batch=16, free_gigabytes=1)

    assert leak_watch.describe(**big).endswith("are used up within the first one.")
    metrics = plan(fault=leak_watch.METRICS)
    assert "no run of that length notices" in leak_watch.describe(**metrics)
    cache = plan(fault=leak_watch.CACHE)
    assert leak_watch.describe(**cache).endswith("trained for 235,240 steps.")


@pytest.mark.usefixtures("unchecked")
def test_the_explorer_follows_a_move_in_less_than_200_ms():
    leak_watch.draw(**plan())  # the first figure loads fonts
    begin = time.process_time()
    png(leak_watch.draw(**plan(micro_batch=3)), scale=LIVE_SCALE, palette=False)
    leak_watch.describe(**plan(micro_batch=3))

    assert time.process_time() - begin < 0.2


def test_panels_say_what_each_run_adds_after_its_warm_up():
    live = {"still": (500, 500, 500, 500), "grows": (0, 1000, 3000, 5000)}
    fig = leaks.growth_panels(live, title="one grows")
    notes = [text.get_text() for axes in fig.axes for text in axes.texts]

    assert notes == ["no byte more", "+2 kB a step"]
    lines = [axes.lines[0] for axes in fig.axes[:2]]
    assert [list(line.get_ydata()) for line in lines] == [[0, 0, 0], [0, 2, 4]]


def test_two_runs_begin_at_nothing():
    live = {"healthy": (2_000_000,) * 3, "sick": (3_000_000, 4_000_000, 5_000_000)}
    fig = leaks.two_runs(live, title="t", notes=("stays", "grows"))

    assert [list(line.get_ydata()) for line in fig.axes[0].lines] == [
        [0, 2, 2, 2],
        [0, 3, 4, 5],
    ]


def test_micro_batches_stand_side_by_side():
    levels = [[0, 4_000_000, 2_000_000], [2_000_000, 5_000_000, 2_000_000]]
    fig = leaks.within_step(levels, title="t", floor=2_000_000, floor_name="kept")
    names = [text.get_text() for text in fig.axes[0].texts]

    assert {"micro-batch 1", "micro-batch 2", "kept stay: 2 MB"} <= set(names)
    assert fig.axes[0].get_xlim() == (0, 6)


def test_a_runway_of_no_step_is_still_a_bar():
    parts = [Part(name="graph", amount=0, meaning="activations")]
    fig = leaks.runway(parts, title="t", n_steps=100, chosen="graph")

    assert fig.axes[0].patches[0].get_width() > 0
    assert fig.axes[0].texts[0].get_text() == "0"


def test_the_models_are_the_published_ones_in_width():
    for cfg, layout in MODELS.values():
        published = [PRESETS["v3-671b"], PRESETS["v2-lite-16b"]]
        assert cfg.attention in [preset.attention for preset in published]
        assert cfg.moe.n_routed_experts % layout.ep == 0
