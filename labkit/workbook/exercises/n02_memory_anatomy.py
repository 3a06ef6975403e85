"""Exercises of notebook 02: what lasts, what peaks, and what fits on few cards."""

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory import STATES, MemoryReport, overheads, predict
from labkit.workbook.exercises.spec import Case, Exercise, Misconception, Score

V3 = PRESETS["v3-671b"]

CARD = "h800"

FEW = {"layout": Layout(pp=16, dp=16, ep=16), "zero": 1, "recompute": "full"}
"""An answer to "v3_on_few_cards": 256 of the 2,048 cards."""


def bytes_under_zero(n_params: int, n_ranks: int, zero: int) -> float:
    """Return what a rank keeps: 2 of weights, 4 of gradients, 8 of the optimizer."""
    weights = 2 / (n_ranks if zero >= 3 else 1)
    gradients = 4 / (n_ranks if zero >= 2 else 1)
    optimizer = 8 / (n_ranks if zero >= 1 else 1)
    return n_params * (weights + gradients + optimizer)


def _one_stage_ahead(n_params: int, n_ranks: int, zero: int) -> float:
    return bytes_under_zero(n_params, n_ranks, zero + 1 if zero else 0)


def _all_at_once(n_params: int, n_ranks: int, zero: int) -> float:
    return n_params * 14 / (n_ranks if zero else 1)


def _no_master(n_params: int, n_ranks: int, zero: int) -> float:
    return bytes_under_zero(n_params, n_ranks, zero) - n_params * 4 / (
        n_ranks if zero else 1
    )


def _whole_master(n_params: int, n_ranks: int, zero: int) -> float:
    return bytes_under_zero(n_params, n_ranks, zero) + n_params * (
        4 - 4 / n_ranks if zero else 0
    )


def peak_of(timeline: Sequence[Mapping[str, int]]) -> int:
    """Return the most bytes that live at once: add up first, then look for the most."""
    return max(sum(instant.values()) for instant in timeline)


STEP = [
    {"weights": 4, "moments": 8},
    {"weights": 4, "moments": 8, "activations": 9},
    {"weights": 4, "moments": 8, "activations": 5, "gradients": 3},
    {"weights": 4, "moments": 8, "gradients": 4},
]

LONG_STEP = [{"weights": 2, "logits": 3}, {"weights": 2}, {"weights": 2, "logits": 1}]


def kept_by_stage(n_bytes: int, pp: int, n_micro_batches: int) -> list[int]:
    """Return the bytes of activations on each stage of a 1F1B pipeline."""
    return [n_bytes * min(n_micro_batches, pp - stage) for stage in range(pp)]


def v3_report(layout: Layout, **as_predict: Any) -> MemoryReport:  # noqa: ANN401
    """Return what DeepSeek-V3 needs with 4,096 tokens at a time, in BF16.

    There are as many micro-batches as pipeline stages.
    """
    train = TrainConfig(
        micro_batch=1,
        global_batch=layout.dp * layout.pp,
        seq_len=4096,
        precision="bf16",
    )
    states = STATES["deepseek-v3"]
    return predict(V3, train, layout, CARD, states=states, **as_predict)


def most_gigabytes(plan: Mapping[str, Any]) -> float:
    """Return the GB that a plan may take of a card, unpredicted ones included."""
    report = v3_report(**plan)
    return (report.peak + overheads(report, plan["layout"], CARD).high) / 1e9


def n_cards(plan: object) -> int:
    """Return the cards that the plan takes; refuse what is no plan."""
    layout = plan.get("layout") if isinstance(plan, Mapping) else None
    if not isinstance(layout, Layout):
        raise ValueError(
            "a plan must be a dict with a Layout in it; got "
            f"{plan!r}. Give dict(layout=Layout(pp=…, dp=…, ep=…), zero=…)."
        )
    return layout.n_ranks


EXERCISES = (
    Exercise(
        name="bytes_under_zero",
        kind="write",
        title="What ZeRO leaves on a rank",
        difficulty=1,
        minutes=6,
        task="Write `bytes_under_zero(n_params, n_ranks, zero)`: the bytes that last "
        "on one of `n_ranks` ranks which train the same parameters, with DeepSeek-V3's "
        "BF16 recipe: per parameter 2 bytes of weight, 4 of gradient, 4 of master copy "
        "and 2 + 2 of moments. Stage `zero` shares out nothing (0), optimizer states "
        "(1), gradients too (2), weights too (3).",
        stub="def bytes_under_zero(n_params, n_ranks, zero):\n    ...",
        cases=(
            Case(
                given="1,000 parameters on 8 ranks, ZeRO-0",
                args=(1000, 8, 0),
                expected=14_000.0,
            ),
            Case(
                given="1,000 parameters on 8 ranks, ZeRO-1",
                args=(1000, 8, 1),
                expected=7000.0,
            ),
            Case(
                given="1,000 parameters on 8 ranks, ZeRO-2",
                args=(1000, 8, 2),
                expected=3500.0,
            ),
            Case(
                given="1,000 parameters on 8 ranks, ZeRO-3",
                args=(1000, 8, 3),
                expected=1750.0,
            ),
            Case(
                given="the experts of one stage on 8 ranks, ZeRO-1",
                args=(5_820_645_376, 8, 1),
                expected=40_744_517_632.0,
            ),
        ),
        misconceptions=(
            Misconception(
                _one_stage_ahead,
                "ZeRO-1 shares out optimizer states only; gradients follow in stage 2, "
                "weights in stage 3",
            ),
            Misconception(
                _all_at_once, "that shares out everything at once, which is stage 3"
            ),
            Misconception(_no_master, "the master copy is missing: 4 bytes more"),
            Misconception(
                _whole_master, "the master copy is optimizer state, shared from stage 1"
            ),
        ),
        hints=(
            "Three numbers: 2 for weights, 4 for gradients, 8 for the optimizer.",
            "Each is divided by `n_ranks` from its own stage on: 3, 2 and 1.",
            "`2 / (n_ranks if zero >= 3 else 1)` is the first of three such terms.",
        ),
        solution=bytes_under_zero,
        because="the 8 bytes of the optimizer go first, as each rank can update its "
        "own share.",
    ),
    Exercise(
        name="peak_of_a_step",
        kind="fix",
        title="The report that asks for too much",
        difficulty=1,
        minutes=5,
        task="`peak_of(timeline)` gets a dict of bytes by part for each instant of a "
        "step, and should return the most bytes that live at once. It always asks for "
        "more memory than the run takes. Find the bug.",
        stub='''def peak_of(timeline):
    """Most bytes that live at once."""
    parts = {part for instant in timeline for part in instant}
    return sum(max(instant.get(part, 0) for instant in timeline) for part in parts)''',
        cases=(
            Case(given="a step of four instants", args=(STEP,), expected=21),
            Case(given="logits at both ends", args=(LONG_STEP,), expected=5),
            Case(
                given="one instant", args=([{"weights": 7, "moments": 1}],), expected=8
            ),
            Case(
                given="parts that never meet",
                args=([{"activations": 6}, {"gradients": 6}],),
                expected=6,
            ),
        ),
        misconceptions=(
            Misconception(
                lambda timeline: max(max(instant.values()) for instant in timeline),
                "that is the largest part at any instant: parts that live together "
                "add up",
            ),
            Misconception(
                lambda timeline: sum(sum(instant.values()) for instant in timeline),
                "that adds up instants: what is freed is there to be used again",
            ),
            Misconception(
                lambda timeline: sum(timeline[-1].values()),
                "that is the end of the step, when activations are gone",
            ),
        ),
        hints=(
            "Are activations and gradients ever at their most in the same instant?",
            "Add up within an instant first, then compare instants.",
            "`max(sum(…) for instant in timeline)`",
        ),
        solution=peak_of,
        because="the largest sum is not the sum of the largest.",
    ),
    Exercise(
        name="logits_at_once",
        kind="predict",
        title="The widest tensor of the model",
        difficulty=2,
        minutes=5,
        task="The last stage of DeepSeek-V3 computes the loss of 4,096 tokens, with "
        "129,280 words to choose from. The head gives logits in BF16; the loss copies "
        "them to FP32 and makes log-probabilities of that copy, in FP32 too. How many "
        "GB live at once, before anything is freed? First say which of the three "
        "tensors the backward needs. A guess within a twentieth counts.",
        stub="gigabytes = None",
        cases=(Case(given="", expected=5.2953, tolerance=0.05, unit="GB"),),
        misconceptions=(
            Misconception(1.0591, "those are the BF16 logits alone"),
            Misconception(
                2.1181, "that is one tensor in FP32: two others live with it"
            ),
            Misconception(3.1772, "one FP32 tensor is missing"),
            Misconception(
                4.2362, "the BF16 logits, which the copy is made of, are missing"
            ),
            Misconception(5.2953e9, "those are bytes: give GB"),
        ),
        hints=(
            "One tensor has 4,096 × 129,280 values.",
            "Two bytes for each in BF16, four in FP32, and four in FP32 again.",
        ),
        solution=5.2953,
        because="only the log-probabilities are kept for the backward; the other 6 of "
        "10 bytes live for an instant, and still count in the peak.",
    ),
    Exercise(
        name="kept_by_stage",
        kind="write",
        title="Who waits longest",
        difficulty=2,
        minutes=7,
        task="In a 1F1B pipeline each stage begins to work backward as soon as it can. "
        "Until then it keeps every micro-batch that it has sent forward. Write "
        "`kept_by_stage(n_bytes, pp, n_micro_batches)`: a list of the bytes of "
        "activations on each of `pp` stages when they keep most, if a stage keeps "
        "`n_bytes` of one micro-batch.",
        stub="def kept_by_stage(n_bytes, pp, n_micro_batches):\n    ...",
        cases=(
            Case(
                given="4 stages, 8 micro-batches",
                args=(10, 4, 8),
                expected=[40, 30, 20, 10],
            ),
            Case(
                given="4 stages, 2 micro-batches",
                args=(10, 4, 2),
                expected=[20, 20, 20, 10],
            ),
            Case(given="a single stage", args=(7, 1, 8), expected=[7]),
            Case(given="one micro-batch", args=(3, 3, 1), expected=[3, 3, 3]),
        ),
        misconceptions=(
            Misconception(
                lambda n_bytes, pp, n_micro_batches: [n_bytes * n_micro_batches] * pp,
                "that is GPipe, which sends all micro-batches forward first",
            ),
            Misconception(
                lambda n_bytes, pp, n_micro_batches: [
                    n_bytes * min(n_micro_batches, stage + 1) for stage in range(pp)
                ],
                "the other way round: the first stage waits for all the others",
            ),
            Misconception(
                lambda n_bytes, pp, n_micro_batches: [
                    n_bytes * (pp - stage) for stage in range(pp)
                ],
                "no stage keeps more micro-batches than there are",
            ),
            Misconception(
                lambda n_bytes, pp, n_micro_batches: (
                    [n_bytes * min(n_micro_batches, pp)] * pp
                ),
                "the last stage goes backward at once, so it keeps one",
            ),
        ),
        hints=(
            "The last stage can go backward at once: it keeps one micro-batch.",
            "The one before it sends one more forward while it waits.",
            "`min(n_micro_batches, pp - stage)` micro-batches.",
        ),
        solution=kept_by_stage,
        because="more stages mean fewer layers on each and more micro-batches in "
        "flight: on the first stage the two cancel.",
    ),
    Exercise(
        name="v3_on_few_cards",
        kind="target",
        title="671 billion parameters on 512 cards",
        difficulty=3,
        minutes=15,
        task="Train DeepSeek-V3 on at most 512 H800 instead of 2,048, so that it "
        "surely fits: the peak with the most that is not predicted stays within 85.5 "
        "GB. Give arguments of `predict` as a dict, such as "
        "`dict(layout=Layout(pp=16, dp=128, ep=64), zero=1)`. The micro-batch is 1 × "
        "4,096 tokens, states are DeepSeek-V3's in BF16. `recompute` is none, "
        "selective, attention, moe or full. The score is the number of cards.",
        stub="my_plan = None",
        cases=(
            Case(
                given="the number of cards", measure=n_cards, at_most=512, unit="cards"
            ),
            Case(
                given="a card",
                measure=most_gigabytes,
                at_most=85.5,
                unit="GB",
            ),
        ),
        misconceptions=(
            Misconception(
                {"layout": Layout(pp=16, dp=128, ep=64), "zero": 1},
                "that is the published layout: it is too large, and takes FP8 and "
                "recompute besides",
            ),
            Misconception(
                {"layout": Layout(pp=16, dp=32, ep=32), "zero": 1},
                "activations of 16 micro-batches wait on the first stage: recompute "
                "them",
            ),
            Misconception(
                {"layout": Layout(pp=16, dp=32, ep=8), "recompute": "full"},
                "four ranks keep the same states of the same experts: share them out "
                "by ZeRO, or raise ep",
            ),
        ),
        hints=(
            "`report.by_part` of a plan says what is biggest. Without recompute it is "
            "activations.",
            "With `recompute='full'` states are next: which `zero` shares them out?",
            "All states together are 9.6 TB. Over 256 cards that is 37 GB each, which "
            "leaves room: `pp=16, dp=16, ep=16`.",
        ),
        solution=FEW,
        because="it fits, and pays with time: each layer runs again, and every card "
        "has eight times the work.",
        score=Score(of=n_cards, unit="cards"),
    ),
)
