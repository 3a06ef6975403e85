"""Exercises of notebook 10: bytes of ZeRO, cuts, a deadlock, and 671 billion."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory import STATES, fits, predict
from labkit.parallel.communication import form
from labkit.parallel.pipeline import parse, timeline_of
from labkit.workbook.exercises.spec import Case, Exercise, Misconception, Score
from labkit.workbook.step_shares import Run

V3 = PRESETS["v3-671b"]
# Every number of data-parallel ranks gets as many sequences.
RECIPE = TrainConfig(micro_batch=1, global_batch=16_384, seq_len=4096, precision="bf16")


def sent(n_bytes: float, dp: int, zero: int) -> float:
    """Return the bytes that a rank sends in a step of one micro-batch."""
    once = form("all_gather", dp).share * n_bytes
    return (3 if zero == 3 else 2) * once


Costs = Sequence[float]
Cut = Callable[[Costs, int], Sequence[int]]
"""What the exercise on stages asks for."""


def cut(costs: Costs, n_stages: int) -> list[int]:
    """Return how many items each stage takes, the fullest as light as can be."""
    until = [0, *accumulate(costs)]

    @cache
    def best(start: int, n: int) -> tuple[float, tuple[int, ...]]:
        if n == 1:
            return until[-1] - until[start], (len(costs) - start,)
        found = []
        for stop in range(start + 1, len(costs) - n + 2):
            rest, sizes = best(stop, n - 1)
            found.append(
                (max(until[stop] - until[start], rest), (stop - start, *sizes))
            )
        return min(found)

    return list(best(0, n_stages)[1])


def _equal_numbers(costs: Costs, n_stages: int) -> list[int]:
    each, rest = divmod(len(costs), n_stages)
    return [each + (index < rest) for index in range(n_stages)]


def _up_to_the_mean(costs: Costs, n_stages: int) -> list[int]:
    mean = sum(costs) / n_stages
    sizes, work = [0], 0.0
    for cost in costs:
        if work + cost > mean and sizes[-1] and len(sizes) < n_stages:
            sizes.append(0)
            work = 0.0
        sizes[-1] += 1
        work += cost
    return sizes


def _last_alone(costs: Costs, n_stages: int) -> list[int]:
    return [*_equal_numbers(costs[:-1], n_stages - 1), 1]


def fullest(costs: Costs, n_stages: int) -> Callable[[Cut], float]:
    """Return what tells the work of a cut's fullest stage."""

    def measure(cut: Cut) -> float:
        sizes = list(cut(list(costs), n_stages))
        if len(sizes) != n_stages or sum(sizes) != len(costs) or min(sizes) < 1:
            raise ValueError(
                f"{n_stages} whole numbers of at least 1 must sum to {len(costs)}; "
                f"got {sizes}. Correct the cut."
            )
        stops = [0, *accumulate(sizes)]
        return max(sum(costs[start:stop]) for start, stop in pairwise(stops))

    return measure


EIGHT_AND_A_HEAD = [1] * 8 + [4]
HEAVY_FRONT = [3, 3, 2, 1, 1]
V3_IN_TENTHS = [10] * 61 + [39]
"""Layers of DeepSeek-V3, and what follows them: head and MTP."""


Orders = Callable[[], Sequence[str]]
"""What the exercise on a deadlock asks for."""

ONE_EACH = " ".join(f"{{0}}F{n} {{0}}B{n}" for n in range(4))


def one_forward_one_backward() -> list[str]:
    """Return the orders of 1F1B: a rank runs ahead by the ranks behind it."""
    return [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def _all_forwards_first() -> list[str]:
    rows = []
    for rank in range(3):
        passes = [f"{rank}{kind}{n}" for kind in "FB" for n in range(4)]
        rows.append(" ".join(passes))
    return rows


def _one_at_a_time() -> list[str]:
    return [ONE_EACH.format(rank) for rank in range(3)]


def _two_ahead() -> list[str]:
    rows = one_forward_one_backward()
    return ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", *rows[1:]]


def ends(orders: Orders) -> str:
    """Return that the ranks end; raises the reason if they do not."""
    timeline_of(parse(list(orders())))
    return "they end"


def bubble(orders: Orders) -> float:
    """Return how long the rank waits which waits most, a forward pass taking 1."""
    return timeline_of(parse(list(orders()))).bubble


def most_kept(orders: Orders) -> int:
    """Return of how many micro-batches a rank keeps activations, at most."""
    timeline = timeline_of(parse(list(orders())))
    return max(sum(timeline.peak_live(rank).values()) for rank in range(3))


def n_gpus(layout: Layout) -> int:
    """Return the GPUs of a layout."""
    return layout.n_ranks


def verdict(layout: Layout) -> str:
    """Return whether DeepSeek-V3 fits an H800 in this layout; see `fits`."""
    report = predict(
        V3,
        RECIPE,
        layout,
        "h800",
        recompute="attention",
        zero=1,
        states=STATES["deepseek-v3-fp8"],
        cached="fp8",
    )
    return fits(report, layout=layout, device="h800")


def seconds(layout: Layout) -> float:
    """Return the predicted seconds of a step, nothing hidden behind anything."""
    return Run(layout=layout).parts.total


EXERCISES = (
    Exercise(
        name="sent_by_zero",
        kind="write",
        title="What sharing costs in messages",
        difficulty=1,
        minutes=6,
        task="Write `sent(n_bytes, dp, zero)`: the bytes that each of `dp` ranks sends "
        "in a step of one micro-batch, where weights and gradients take `n_bytes` "
        "each. ZeRO-0 all-reduces the gradients in a ring; ZeRO-1 and 2 reduce-scatter "
        "them and gather the new weights; ZeRO-3 gathers the weights for the forward, "
        "again for the backward, and reduce-scatters gradients.",
        stub="def sent(n_bytes, dp, zero):\n    ...",
        cases=(
            Case(given="4 ranks, ZeRO-0", args=(1000, 4, 0), expected=1500.0),
            Case(given="4 ranks, ZeRO-1", args=(1000, 4, 1), expected=1500.0),
            Case(given="8 ranks, ZeRO-2", args=(1000, 8, 2), expected=1750.0),
            Case(given="4 ranks, ZeRO-3", args=(1000, 4, 3), expected=2250.0),
            Case(given="one rank, ZeRO-3", args=(1000, 1, 3), expected=0.0),
        ),
        misconceptions=(
            Misconception(
                lambda n, dp, zero: (1, 2, 2, 3)[zero] * (dp - 1) / dp * n,
                "an all-reduce passes over the data twice: once to sum, once to tell "
                "everyone",
            ),
            Misconception(
                lambda n, dp, zero: (2, 3, 3, 3)[zero] * (dp - 1) / dp * n,
                "ZeRO-1 needs no all-reduce: a rank that updates a part needs the sum "
                "of that part only",
            ),
            Misconception(
                lambda n, dp, zero: 2 * (dp - 1) / dp * n,
                "ZeRO-3 has given the weights away again by the time of the backward",
            ),
            Misconception(
                lambda n, dp, zero: (2, 2, 2, 3)[zero] * n,
                "a rank does not send its own part to itself: (dp - 1) / dp",
            ),
        ),
        hints=(
            "A gather in a ring sends (dp - 1) / dp of the data from each rank.",
            "A reduce-scatter sends as much, and an all-reduce is both.",
            "Count the passes over the data: 2, 2, 2 and 3.",
        ),
        solution=sent,
        because="ZeRO-1 and 2 share out memory for no more messages; ZeRO-3 pays half "
        "as much again.",
    ),
    Exercise(
        name="cut_stages",
        kind="write",
        title="Where to cut",
        difficulty=2,
        minutes=12,
        task="A pipeline is as slow as its fullest stage. Write "
        "`cut(costs, n_stages)`: from what each layer takes, in order, the head among "
        "the last, to how many layers each stage gets. At least one each, and the "
        "fullest stage must have as little work as possible. "
        "`cut([1, 1, 2], 2)` is `[2, 1]`.",
        stub="def cut(costs, n_stages):\n    ...",
        cases=(
            Case(
                given="the fullest of 3 stages, 8 layers of 1 and a head of 4",
                measure=fullest(EIGHT_AND_A_HEAD, 3),
                expected=4,
            ),
            Case(
                given="the fullest of 2 stages, layers of 3, 3, 2, 1 and 1",
                measure=fullest(HEAVY_FRONT, 2),
                expected=6,
            ),
            Case(
                given="the fullest of 16 stages, DeepSeek-V3 with its head and MTP",
                measure=fullest(V3_IN_TENTHS, 16),
                expected=49,
            ),
        ),
        misconceptions=(
            Misconception(
                _equal_numbers,
                "that gives each stage as many layers; the one with the head is the "
                "slowest, and all others wait for it",
            ),
            Misconception(
                _up_to_the_mean,
                "a stage that must stay below the mean leaves all the rest to the last",
            ),
            Misconception(
                _last_alone,
                "the head need not be alone: beside a layer it is still no fuller than "
                "a stage of five",
            ),
        ),
        hints=(
            "Guess a limit. How many stages do you need if none may exceed it?",
            "Fill each stage up to the limit, then begin the next.",
            "Try limits from the largest cost upward: sums of consecutive layers.",
        ),
        solution=cut,
        because="DeepSeek-V3 has fewer layers than others on its last stage.",
    ),
    Exercise(
        name="break_the_circle",
        kind="fix",
        title="Three ranks that wait for each other",
        difficulty=2,
        minutes=10,
        task="The orders of three ranks for four micro-batches: `0F1` is the forward "
        "of stage 0 for micro-batch 1, and `0B1` its backward. The run hangs. Find out "
        "why, and mend it so that no rank waits longer than under 1F1B, 6 forward "
        "passes, or keeps more than 3 micro-batches. A backward takes 2.",
        stub='''def orders():
    """What each rank does, one after another."""
    return [
        "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]''',
        cases=(
            Case(given="the ranks", measure=ends, expected="they end"),
            Case(given="the longest wait", measure=bubble, at_most=6, unit="passes"),
            Case(
                given="the most that a rank keeps",
                measure=most_kept,
                at_most=3,
                unit="micro-batches",
            ),
        ),
        misconceptions=(
            Misconception(
                _all_forwards_first,
                "all forwards first cannot hang, and keep every micro-batch: that is "
                "GPipe",
            ),
            Misconception(
                _one_at_a_time,
                "one micro-batch after the other never hangs, and never overlaps",
            ),
            Misconception(
                _two_ahead,
                "rank 0 is three passes away from its first gradient: two forwards do "
                "not fill that time",
            ),
        ),
        hints=(
            "What does `1F1` wait for, and where does rank 0 stand then?",
            "`timeline_of(parse(orders()))` says who waits for whom.",
            "Each rank runs ahead by one forward more than the rank behind it.",
        ),
        solution=one_forward_one_backward,
        because="a rank must have sent what the next one needs before it waits for an "
        "answer.",
    ),
    Exercise(
        name="fit_671b",
        kind="target",
        title="671 billion on half the GPUs",
        difficulty=3,
        minutes=15,
        task="DeepSeek had 2,048 H800. You have 1,024. Lay DeepSeek-V3 out so that it "
        "surely fits, with attention computed again, FP8 copies and ZeRO-1, and so "
        "that a step of 15,360 sequences is predicted to take at most 36 seconds with "
        "nothing hidden: `Layout(pp=…, dp=…, tp=…, ep=…)`.",
        stub="layout = None",
        cases=(
            Case(given="the GPUs", measure=n_gpus, expected=1024),
            Case(given="an H800", measure=verdict, expected="fits"),
            Case(given="a step", measure=seconds, at_most=36, unit="s"),
        ),
        misconceptions=(
            Misconception(
                Layout(pp=16, dp=64, ep=64),
                "DeepSeek's own: experts over eight nodes, which pays if messages are "
                "hidden; here nothing is",
            ),
            Misconception(
                Layout(pp=16, dp=8, tp=8, ep=8),
                "tensor parallelism makes room, and its messages cost more than half "
                "of the computation",
            ),
            Misconception(
                Layout(pp=8, dp=128, ep=8),
                "experts within a node are quick to reach, but 32 of each layer do not "
                "fit with eight layers: cut more stages, or spread experts wider",
            ),
            Misconception(
                Layout(pp=1, dp=1024, ep=256),
                "without a pipeline each GPU has all 61 layers of everything but the "
                "experts",
            ),
        ),
        hints=(
            "What costs most seconds in the table of layouts, and what makes it less?",
            "Experts spread over few ranks are quick to reach and take much room; more "
            "stages make room.",
            "Try 32 stages, or 16 stages with experts over two nodes.",
        ),
        solution=Layout(pp=32, dp=32, ep=8),
        because="pipeline stages cut everything, and send least.",
        score=Score(of=seconds, unit="s a step"),
    ),
)
