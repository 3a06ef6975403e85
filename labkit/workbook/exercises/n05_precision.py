"""Exercises of notebook 05: scales, shares, what stays high, and what is kept twice."""

import math

from labkit.precision import speed_up
from labkit.workbook.exercises.narrow_numbers import (
    LARGEST,
    PARTS,
    TO_STAY,
    bytes_kept,
    dispatched,
    error_of_tiny_token,
    exact_scale,
    fp8_share,
    growth,
    nearest_power,
    no_floor,
    project,
    project_and_forget,
    project_and_keep_weights,
    project_coarsely,
    project_in_bf16,
    quantize_row,
    restored,
    scale_of,
    scale_of_hundred,
    too_narrow,
    unknown,
    without_sign,
)
from labkit.workbook.exercises.spec import Case, Exercise, Misconception

EXERCISES = (
    Exercise(
        name="scale_of_a_tile",
        kind="write",
        title="Round the scale up",
        difficulty=1,
        minutes=5,
        task="Write `scale_of(largest)`: the smallest power of two that a tile can be "
        "divided by, so that its largest magnitude, a number above 0, fits into E4M3, "
        "which ends at 448.",
        stub="def scale_of(largest):\n    ...",
        cases=(
            Case(given="a largest value of 448", args=(448.0,), expected=1.0),
            Case(given="449", args=(449.0,), expected=2.0),
            Case(given="100", args=(100.0,), expected=0.25),
            Case(given="1", args=(1.0,), expected=0.00390625),
            Case(given="1,792", args=(1792.0,), expected=4.0),
        ),
        misconceptions=(
            Misconception(
                lambda largest: 2.0 ** round(math.log2(largest / LARGEST)),
                "the nearest power of two may be the lower one: then the largest "
                "values are cut off at 448",
            ),
            Misconception(
                lambda largest: 2.0 ** math.floor(math.log2(largest / LARGEST)),
                "rounded down, the largest values are cut off at 448",
            ),
            Misconception(
                lambda largest: 2.0 ** (math.floor(math.log2(largest / LARGEST)) + 1),
                "where the exact scale is a power of two, it is the answer: that "
                "gives a bit away",
            ),
            Misconception(
                lambda largest: largest / LARGEST,
                "that is the exact scale: it is no power of two",
            ),
            Misconception(
                lambda largest: 2.0 ** math.ceil(math.log2(largest)),
                "that brings the tile to 1: E4M3 goes up to 448",
            ),
        ),
        hints=(
            "Which scale would map the largest value to 448 exactly?",
            "Its logarithm, rounded up, is the exponent.",
            "`2.0 ** math.ceil(math.log2(largest / 448))`",
        ),
        solution=scale_of,
        because="up to half of the range above the tile stays empty, and nothing is "
        "cut off.",
    ),
    Exercise(
        name="stored_scale",
        kind="fix",
        title="The scale that was not divided by",
        difficulty=2,
        minutes=8,
        task="`quantize_row` gives a row of 128 as E4M3 values (in FP32, to look at) "
        "and a scale that is a power of two. Values times scale should be the row "
        "again, up to rounding. They are up to twice as large. Find the bug; and see "
        "that a row of zeros comes back as zeros.",
        stub='''def quantize_row(x):
    """E4M3 values of a row, and its scale, a power of two."""
    exact = x.abs().max() / 448
    values = (x / exact).to(torch.float8_e4m3fn)
    scale = 2 ** torch.ceil(torch.log2(exact))
    return values.float(), scale''',
        cases=(
            Case(
                given="the scale of a row whose largest value is 100",
                measure=scale_of_hundred,
                expected=0.25,
            ),
            Case(
                given="100, -7 and 0.3, there and back",
                measure=restored(100.0, -7.0, 0.3),
                expected=[96.0, -7.0, 0.3125],
            ),
            Case(
                given="-300 and 2, there and back",
                measure=restored(-300.0, 2.0),
                expected=[-288.0, 2.0],
            ),
            Case(
                given="440 and 0.03, there and back",
                measure=restored(440.0, 0.03),
                expected=[448.0, 0.029296875],
            ),
            Case(
                given="600 and 1, there and back",
                measure=restored(600.0, 1.0),
                expected=[576.0, 1.0],
            ),
            Case(
                given="zeros, there and back",
                measure=restored(0.0, 0.0),
                expected=[0.0, 0.0],
            ),
        ),
        misconceptions=(
            Misconception(
                exact_scale,
                "divided and stored are one scale now, but it is no power of two",
            ),
            Misconception(
                nearest_power,
                "the nearest power of two may be too small: the largest value is cut "
                "off. Round up",
            ),
            Misconception(
                no_floor,
                "a row of zeros has the scale 0, and 0 / 0 is not a number: give the "
                "largest value a floor",
            ),
            Misconception(
                without_sign,
                "the largest magnitude may belong to a negative value",
            ),
        ),
        hints=(
            "By what is `x` divided, and what is returned?",
            "Round the scale first, then divide by the rounded one.",
            "`.clamp_min(1e-12)` on the largest magnitude keeps zeros apart from "
            "0 / 0.",
        ),
        solution=quantize_row,
        because="who reads the tile knows only the scale that was stored.",
    ),
    Exercise(
        name="growth_of_a_share",
        kind="write",
        title="What a share of the step is worth",
        difficulty=1,
        minutes=5,
        task="FP8 products take `share` of a BF16 step's time, and with all quantizing "
        "counted they become `factor` times as fast. Write `growth(share, factor)`: by "
        "how much throughput grows, as 0.2 for 20 per cent.",
        stub="def growth(share, factor):\n    ...",
        cases=(
            Case(
                given="a share of 0.6, 1.4 times as fast",
                args=(0.6, 1.4),
                expected=0.2069,
                tolerance=1e-3,
            ),
            Case(
                given="a share of 0.7, 1.6 times as fast",
                args=(0.7, 1.6),
                expected=0.3559,
                tolerance=1e-3,
            ),
            Case(given="everything, twice as fast", args=(1.0, 2.0), expected=1.0),
            Case(given="nothing, twice as fast", args=(0.0, 2.0), expected=0.0),
            Case(
                given="half of the step, 0.5 times as fast",
                args=(0.5, 0.5),
                expected=-0.3333,
                tolerance=1e-3,
            ),
        ),
        misconceptions=(
            Misconception(
                lambda share, factor: share * (factor - 1),
                "the rest of the step still takes its time: add up the times of both "
                "parts first",
            ),
            Misconception(
                lambda share, factor: share * (1 - 1 / factor),
                "that is the time saved: throughput is one by the time",
            ),
            Misconception(
                lambda share, factor: 1 / (1 - share + share / factor),
                "that is the throughput by the one before: how much is it above 1?",
            ),
            Misconception(
                lambda share, factor: factor - 1,
                "only a share of the step becomes faster",
            ),
            Misconception(
                lambda share, factor: 100 * growth(share, factor),
                "that is in per cent: give 0.2 for 20 per cent",
            ),
        ),
        hints=(
            "How long does a step of one second take afterwards?",
            "`1 - share` seconds stay, and `share / factor` are left of the others.",
            "`1 / ((1 - share) + share / factor) - 1`",
        ),
        solution=speed_up,
        because="what is not FP8 soon is most of the step.",
    ),
    Exercise(
        name="kept_once",
        kind="fix",
        title="The memory that FP8 did not save",
        difficulty=2,
        minutes=8,
        task="`project` multiplies one input by several weights, as for queries, keys "
        "and values, and says what it keeps for the backward pass. In BF16 the three "
        "would share 2 bytes a value. Here they keep 3.02. Find the bug; tiles stay as "
        "they are.",
        stub='''def project(x, weights):
    """x times each weight, and what is kept for the backward pass."""
    outputs, kept = [], []
    for weight in weights:
        rows = quantize(x, QuantSpec())
        outputs.append(fp8_mm(rows, quantize(weight, QuantSpec(tile=(128, 128)))))
        kept.append(rows)
    return outputs, kept''',
        cases=(
            Case(
                given="64 tokens of 256 values and three weights",
                measure=bytes_kept,
                expected=16_512,
                unit="bytes",
            ),
            Case(
                given="the error of a token that is a millionth of the others",
                measure=error_of_tiny_token,
                at_most=6,
                unit="%",
            ),
        ),
        misconceptions=(
            Misconception(
                project_in_bf16,
                "one input for all, but in BF16: the FP8 values are half of that, and "
                "the backward can read them",
            ),
            Misconception(
                project_and_forget,
                "gradients of the weights need the input: keep it, once",
            ),
            Misconception(
                project_and_keep_weights,
                "weights are there anyway: they are no activations",
            ),
            Misconception(
                project_coarsely,
                "one scale for all tokens saves a few bytes, and loses every small "
                "token",
            ),
        ),
        hints=(
            "How often is `x` quantized?",
            "The three results are equal: one will do for all.",
            "Quantize before the loop, and keep that one.",
        ),
        solution=project,
        because="a converted layer alone cannot know that others read its input too.",
    ),
    Exercise(
        name="what_stays_high",
        kind="target",
        title="As narrow as DeepSeek-V3",
        difficulty=2,
        minutes=6,
        task="Name what stays in BF16 or FP32, as a tuple of words, and leave at least "
        "83 % of V3's FLOPs for FP8. Nothing that DeepSeek-V3 leaves high may be FP8. "
        f"The words: {', '.join(PARTS)}.",
        stub="high = None",
        cases=(
            Case(given="words that name no part", measure=unknown, expected="none"),
            Case(
                given="what must not be FP8, and is",
                measure=too_narrow,
                expected="none",
            ),
            Case(given="what is sent to experts", measure=dispatched, expected="FP8"),
            Case(
                given="FLOPs that are left for FP8",
                measure=fp8_share,
                at_least=83,
                unit="%",
            ),
        ),
        misconceptions=(
            Misconception(
                (*TO_STAY, "experts"),
                "experts are linear layers too, and nearly half of the work",
            ),
            Misconception(
                (*TO_STAY, "wq_a", "wq_b", "wkv_a", "wkv_b", "wo"),
                "attention's projections are linear layers: its core alone stays high",
            ),
            Misconception(
                ("embed", "norms", "core", "gate", "head"),
                "what comes back from the experts is summed at the other end: it is "
                "sent in BF16",
            ),
            Misconception(
                (*TO_STAY, "dispatch"),
                "what is received is multiplied in FP8, and can be sent in FP8",
            ),
            Misconception(
                ("norms", "core", "gate", "combine"),
                "both ends of the model stay high as well",
            ),
            Misconception(
                ("embed", "norms", "core", "combine", "head"),
                "the router chooses between experts that are nearly equal",
            ),
            Misconception(PARTS, "then nothing is FP8"),
        ),
        hints=(
            "What multiplies by a weight matrix, and what does not?",
            "Two of the layers that do multiply stay high all the same: one ends the "
            "model, one chooses experts.",
            "Of dispatch and combine only one is FP8: what is received is multiplied, "
            "what comes back is summed.",
        ),
        solution=TO_STAY,
        because="six words of seventeen stay high, and they are a sixth of the work.",
    ),
)
