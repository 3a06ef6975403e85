"""The communication planner: its numbers, its extremes, and its advice."""

import itertools
import time

import pytest

from labkit.workbook.widgets.communication_planner import (
    CARDS,
    GRADIENTS,
    RUNS,
    TOKENS,
    CommunicationPlan,
    controls,
    describe,
    draw,
)

START = {name: control.value for name, control in controls().items()}
V3, LITE = RUNS
TUNED = {
    "tokens": "FP8 there, BF16 back",
    "is_deduplicated": True,
    "overlap": 85,
}


def at(**changes):
    return START | changes


def test_it_starts_with_everything_sent_plainly():
    plan = CommunicationPlan(**START)

    assert plan.plain.parts == plan.chosen.parts
    assert plan.speed_up == 1
    assert "sent plainly" in draw(**START).get_suptitle()


def test_remedies_of_deepseek_v3_leave_few_messages():
    plan = CommunicationPlan(**at(**TUNED))

    assert plan.plain.parts.communication_share > 0.4
    assert plan.chosen.parts.communication_share < 0.1
    assert plan.speed_up > 1.8


def test_half_the_bytes_of_tokens_take_half_the_time():
    wide, narrow = (
        CommunicationPlan(**at(tokens=name)).chosen.parts.experts
        for name in ("FP32", "BF16")
    )

    assert narrow == pytest.approx(wide / 2, rel=0.05)  # latencies stay


def test_gradients_travel_in_the_bytes_that_are_chosen():
    seconds = [
        CommunicationPlan(**at(run=LITE, gradients=name)).chosen.gradient_seconds
        for name in GRADIENTS
    ]

    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == len(GRADIENTS)


def test_full_experts_are_no_fault_of_links():
    text = describe(**at(**TUNED, imbalance=200))

    assert "Longest wait: waits for full experts" in text
    assert "balance the experts: no link is at fault." in text


def test_a_slow_dispatch_is_told_to_send_less():
    assert "Longest wait: tokens" in describe(**START)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("run", RUNS)
def test_every_control_changes_the_sentence(run):
    values = {
        "card": list(CARDS),
        "tokens": list(TOKENS),
        "is_deduplicated": (False, True),
        "overlap": (0, 5, 100),
        "gradients": list(GRADIENTS),
        "is_hierarchical": (False, True),
        "imbalance": (100, 105, 200),
    }
    assert values.keys() == START.keys() - {"run"}
    for name, several in values.items():
        texts = {describe(**at(run=run) | {name: value}) for value in several}
        if run == LITE and name == "is_deduplicated":
            continue  # its experts are within a node, which gets each token once anyway
        assert len(texts) == len(several), name


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("run", RUNS)
def test_no_combination_of_extremes_is_an_error(run):
    ends = {
        "card": ("H800", "A100"),
        "tokens": ("FP32", "FP8 there, BF16 back"),
        "is_deduplicated": (False, True),
        "overlap": (0, 100),
        "gradients": ("FP32", "largest 1 %"),
        "imbalance": (100, 200),
    }
    for values in itertools.product(*ends.values()):
        plan = at(run=run) | dict(zip(ends, values, strict=True))
        assert "Remedy: " in describe(**plan)
    draw(**plan)


@pytest.mark.usefixtures("unchecked")
def test_a_move_is_answered_at_once():
    seconds = []
    for _ in range(3):
        start = time.process_time()
        describe(**START), draw(**START)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.15
