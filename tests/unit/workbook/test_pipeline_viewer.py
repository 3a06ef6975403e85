"""The schedule viewer: its numbers, its extremes, and its figure."""

import itertools
import time

import pytest

from labkit.parallel.pipeline import pipeline_timeline, published_bubble
from labkit.workbook.figures.pipeline import LOOKS, schedule_figure
from labkit.workbook.pipelines import SCHEDULES, PipelinePlan, layer_bytes
from labkit.workbook.widgets.pipeline_viewer import controls, describe, draw

START = {name: control.value for name, control in controls().items()}


def at(**changes):
    return START | changes


def test_it_starts_with_1f1b_whose_bubble_is_the_published_one():
    plan = PipelinePlan(**START)

    assert plan.timeline.bubble == published_bubble("1f1b", 4) == 9
    assert plan.shares.waiting == pytest.approx(9 / 33)
    assert describe(**START) == (
        "1F1B on 4 ranks, 8 micro-batches: a step takes 33 forward passes, 1.38 "
        "times its computation; of the ranks' time 27.3 % is waiting. Rank 0 keeps "
        "most: 4 micro-batches, 59.8 GB if the model is DeepSeek-V3."
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_computes_the_same_and_shares_add_up(schedule):
    plan = PipelinePlan(schedule=schedule, pp=4, micro_batches=16, sent=50, tail=20)

    assert plan.computing == 16 * 3 * 4.2
    assert sum(plan.shares) == pytest.approx(1)
    assert min(plan.shares) >= 0


def test_nothing_is_sent_where_nothing_is_asked_for():
    for schedule in SCHEDULES:
        plan = PipelinePlan(schedule=schedule, pp=4, micro_batches=8)
        assert plan.shares.sending == pytest.approx(0)


def test_pairs_hide_what_other_schedules_wait_for():
    plain, paired = (
        PipelinePlan(schedule=name, pp=4, micro_batches=32, sent=100)
        for name in ("1F1B", "DualPipe")
    )

    # All that 1F1B sends is exposed: 2 of 5 units of each micro-batch.
    assert plain.shares.sending / (1 - plain.shares.waiting) == pytest.approx(0.4)
    assert paired.timeline.seconds < 0.8 * plain.timeline.seconds


def test_chunks_are_kept_as_parts_of_a_rank():
    whole, halves = (
        PipelinePlan(schedule=name, pp=4, micro_batches=8)
        for name in ("zero bubble", "ZB-V")
    )

    assert whole.kept == halves.kept == (4, 4, 4, 4)
    assert whole.kept_gb[0] == pytest.approx(4 * 61 / 4 * layer_bytes() / 1e9)


def test_a_layer_keeps_what_the_predictor_says_of_a_sparse_layer():
    assert 0.9e9 < layer_bytes() < 1.0e9


def test_the_head_makes_the_last_stage_slow_and_the_others_wait():
    even = PipelinePlan(**START).shares.waiting
    uneven = PipelinePlan(**at(tail=50))

    assert uneven.shares.waiting > even
    assert max(uneven.timeline.busy) == uneven.timeline.busy[-1] == 8 * 3 * 1.5


@pytest.mark.parametrize(
    ("changes", "drawn", "rule"),
    [
        ({"schedule": "1F1B", "pp": 16}, 16, "1F1B needs at least 16 micro-batches"),
        ({"schedule": "DualPipe", "pp": 8}, 16, "DualPipe needs at least 16"),
        (
            {"schedule": "zero bubble", "pp": 4, "micro_batches": 6},
            6,
            "",
        ),
        (
            {"schedule": "1F1B, interleaved", "pp": 8, "micro_batches": 12},
            12,
            "",
        ),
        (
            {"schedule": "zero bubble", "pp": 16, "micro_batches": 2},
            2,
            "",
        ),
    ],
)
def test_a_schedule_gets_the_micro_batches_that_it_needs_and_says_so(
    changes, drawn, rule
):
    plan = PipelinePlan(**at(**changes))

    assert plan.n == drawn
    assert plan.note.startswith(rule)
    assert bool(rule) == ("drawn with" in plan.note)
    if rule:
        assert plan.note.endswith(f": drawn with {drawn}, not 8.")
        assert plan.note in describe(**at(**changes))


@pytest.mark.usefixtures("unchecked")
def test_every_control_changes_the_sentence():
    values = {
        "schedule": list(SCHEDULES),
        "pp": (2, 4, 8, 16),
        "micro_batches": (2, 4, 6, 8, 12, 16, 24, 32),
        "sent": (0, 10, 100),
        "tail": (0, 10, 100),
    }
    assert values.keys() == START.keys()
    for schedule in SCHEDULES:
        for name, several in values.items():
            texts = {describe(**at(schedule=schedule) | {name: v}) for v in several}
            assert len(texts) == len(several), (schedule, name)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_combination_of_extremes_is_an_error(schedule):
    ends = {"pp": (2, 16), "micro_batches": (2, 32), "sent": (0, 100), "tail": (0, 100)}
    for values in itertools.product(*ends.values()):
        plan = at(schedule=schedule) | dict(zip(ends, values, strict=True))
        assert "a step takes" in describe(**plan)
    draw(**plan)


def test_numbers_are_written_only_where_there_is_room():
    def n_numbers(**changes):
        axes = draw(**at(**changes)).axes[0]
        return [
            artist for artist in axes.patches if artist.get_facecolor()[:3] == (0,) * 3
        ]

    assert len(n_numbers()) == 1  # one path holds all
    assert n_numbers(pp=16, micro_batches=32) == []


def test_ranks_are_rows_with_what_they_keep_beside_them():
    timeline = pipeline_timeline("gpipe", 2, 4)
    fig = schedule_figure(timeline, title="t", kept=(3.0, 1.5), kept_name="kept (GB)")
    left, right = fig.axes

    assert [tick.get_text() for tick in left.get_yticklabels()] == ["rank 0", "rank 1"]
    assert left.get_xlim() == (0, timeline.seconds)
    assert [bar.get_width() for bar in right.patches] == [3.0, 1.5]
    assert right.get_xlabel() == "kept (GB)"
    assert left.get_ylim() == right.get_ylim()


def test_the_key_names_what_is_drawn():
    def names(schedule):
        (key,) = draw(**at(schedule=schedule)).legends
        return [text.get_text() for text in key.get_texts()]

    assert names("1F1B") == ["forward", "backward", "waits"]
    assert names("zero bubble")[2] == LOOKS["W"][1]


@pytest.mark.usefixtures("unchecked")
def test_a_move_is_answered_at_once():
    for schedule in SCHEDULES:
        seconds = []
        for _ in range(3):
            start = time.process_time()
            plan = at(schedule=schedule, pp=8, micro_batches=16)
            describe(**plan), draw(**plan)
            seconds.append(time.process_time() - start)
        assert min(seconds) < 0.15, schedule
