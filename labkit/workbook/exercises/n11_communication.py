"""Exercises of notebook 11: a ring, a share that falls, what is kept back, a cause."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from labkit.parallel.communication import Link, form
from labkit.workbook.exercises.spec import Case, Exercise, Misconception


def seconds(n_bytes: float, n_ranks: int, latency: float, bandwidth: float) -> float:
    """Return what an all-reduce in a ring takes on equal links."""
    link = Link(latency_seconds=latency, bytes_per_second=bandwidth)
    return form("all_reduce", n_ranks).seconds(link, n_bytes)


Compress = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""What the exercise on error feedback asks for."""


def compress(
    gradient: Float[Tensor, "n"], kept: Float[Tensor, "n"], k: int
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Return what is sent of a gradient, and what is kept for the next step."""
    wanted = gradient + kept
    places = wanted.abs().topk(k).indices
    sent = torch.zeros_like(gradient)
    sent[places] = wanted[places]
    return sent, wanted - sent


def _forget(
    gradient: Float[Tensor, "n"], kept: Float[Tensor, "n"], k: int
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    sent, _ = compress(gradient, torch.zeros_like(kept), k)
    return sent, torch.zeros_like(kept)


def _keep_all(
    gradient: Float[Tensor, "n"], kept: Float[Tensor, "n"], k: int
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    sent, _ = compress(gradient, kept, k)
    return sent, gradient + kept


def _choose_by_gradient(
    gradient: Float[Tensor, "n"], kept: Float[Tensor, "n"], k: int
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    places = gradient.abs().topk(k).indices
    sent = torch.zeros_like(gradient)
    sent[places] = (gradient + kept)[places]
    return sent, gradient + kept - sent


STEADY = (1.0, 0.2, -0.1)
"""A gradient that comes again and again; one value of it fits into a message."""


def after_steps(
    compress: Compress, n_steps: int
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Return all that was sent in so many steps, and what is kept back at the end."""
    gradient = torch.tensor(STEADY)
    total, kept = torch.zeros(len(STEADY)), torch.zeros(len(STEADY))
    for _ in range(n_steps):
        sent, kept = compress(gradient.clone(), kept.clone(), 1)
        total = total + sent
    return total, kept


def lost(compress: Compress) -> float:
    """Return the most that is neither sent nor kept, of any value, after 20 steps."""
    total, kept = after_steps(compress, 20)
    return float((20 * torch.tensor(STEADY) - total - kept).abs().max())


def steps_until_sent(compress: Compress) -> float:
    """Return the step in which the second value is first sent; 100 if it never is."""
    for n_steps in range(1, 100):
        if float(after_steps(compress, n_steps)[0][1]):
            return n_steps
    return 100


def n_sent(compress: Compress) -> int:
    """Return how many values the first message has."""
    return int(after_steps(compress, 1)[0].count_nonzero())


def cause(computing: Sequence[float], sending: Sequence[float]) -> str:
    """Return why ranks lose time: "imbalance" or "communication".

    Who computes longest waits for nobody, so that what it sends takes the time of
    messages alone.
    """
    n_ranks = len(computing)
    unequal = max(computing) - sum(computing) / n_ranks
    return "imbalance" if unequal > min(sending) else "communication"


EXERCISES = (
    Exercise(
        name="ring_seconds",
        kind="write",
        title="Once around, twice",
        difficulty=1,
        minutes=6,
        task="Write `seconds(n_bytes, n_ranks, latency, bandwidth)`: what an "
        "all-reduce in a ring takes. Each rank sends a part of 1 / n_ranks at a time "
        "to the next: n_ranks - 1 times until every part is summed somewhere, and as "
        "often again until everyone has all sums. A message takes `latency` seconds "
        "and its bytes divided by `bandwidth`.",
        stub="def seconds(n_bytes, n_ranks, latency, bandwidth):\n    ...",
        cases=(
            Case(given="1 GB, 4 ranks", args=(1e9, 4, 0.0, 1e9), expected=1.5),
            Case(given="no bytes, 8 ranks", args=(0, 8, 1e-6, 1e9), expected=14e-6),
            Case(given="8 MB, 2 ranks", args=(8e6, 2, 1e-3, 1e9), expected=0.010),
            Case(given="one rank", args=(1e9, 1, 1e-3, 1e9), expected=0.0),
        ),
        misconceptions=(
            Misconception(
                lambda n, p, latency, bandwidth: (
                    (p - 1) * (latency + n / p / bandwidth)
                ),
                "after one turn every sum is known to one rank only: it must go round "
                "again",
            ),
            Misconception(
                lambda n, p, latency, bandwidth: (
                    2 * (p - 1) * (latency + n / bandwidth)
                ),
                "that sends all bytes in each message: a message is a part of "
                "1 / n_ranks",
            ),
            Misconception(
                lambda n, p, latency, bandwidth: (
                    2 * latency + 2 * (p - 1) / p * n / bandwidth
                ),
                "each message has its latency, and they come one after another",
            ),
        ),
        hints=(
            "How many messages does a rank send, and of how many bytes?",
            "2 (n_ranks - 1) messages of n_bytes / n_ranks.",
        ),
        solution=seconds,
        because="a ring sends least, and waits longest for latencies.",
    ),
    Exercise(
        name="share_falls",
        kind="predict",
        title="From 40 % to 15 %",
        difficulty=1,
        minutes=3,
        task="Messages take 40 % of a step. They are shortened until they take 15 % of "
        "it; computing takes as long as before. How many times as fast is the step? A "
        "guess within a hundredth counts.",
        stub="times = None",
        cases=(Case(given="", expected=1.417, tolerance=0.01, unit="times"),),
        misconceptions=(
            Misconception(
                2.667, "that is how much the share falls; computing did not change"
            ),
            Misconception(
                1.333,
                "the step is not 25 % shorter: 15 % of the *new* step are messages",
            ),
            Misconception(0.706, "that is the new step by the old one: turn it round"),
            Misconception(
                2.3,
                "the article's number: it would need computing to get faster as well",
            ),
        ),
        hints=(
            "Computing takes 60 of 100 units. What part of the new step is it?",
            "60 is 85 % of the new step.",
        ),
        solution=0.6**-1 * 0.85,
        because="messages that take 40 % can save 40 % at most: 1.67 times.",
    ),
    Exercise(
        name="kept_back",
        kind="fix",
        title="Where small gradients go",
        difficulty=2,
        minutes=10,
        task="`compress` sends the `k` largest values of a gradient and keeps the "
        "others for later: error feedback. Training with it ends a little worse than "
        "it should, and some weights hardly move. Find the bug.",
        stub='''def compress(gradient, kept, k):
    """Return what is sent of a gradient, and what is kept for the next step."""
    wanted = gradient + kept
    places = wanted.abs().topk(k).indices
    sent = torch.zeros_like(gradient)
    sent[places] = wanted[places]
    return sent, gradient * (sent == 0)''',
        cases=(
            Case(given="values in a message of one", measure=n_sent, expected=1),
            Case(
                given="what is neither sent nor kept after 20 steps",
                measure=lost,
                at_most=1e-4,
            ),
            Case(
                given="the step in which a value of 0.2 beside 1.0 is first sent",
                measure=steps_until_sent,
                at_most=7,
            ),
        ),
        misconceptions=(
            Misconception(
                _choose_by_gradient,
                "nothing is lost, but the choice looks at the new gradient alone, and "
                "what has piled up stays",
            ),
            Misconception(
                _forget, "nothing is kept: what is small in every step is never sent"
            ),
            Misconception(
                _keep_all, "what was sent is kept as well, and will be sent again"
            ),
        ),
        hints=(
            "Take a value that is small in each step. What is kept of it after three?",
            "What was kept before, and not sent now either, must stay.",
            "Keep all that was wanted and not sent.",
        ),
        solution=compress,
        because="sums of what is sent follow sums of gradients, a few steps late.",
    ),
    Exercise(
        name="imbalance_or_communication",
        kind="write",
        title="Who is to blame?",
        difficulty=3,
        minutes=12,
        task="Eight GPUs are not eight times as fast. For each rank you have the "
        "seconds that it computed and the seconds that it was in collectives, where it "
        "also waits for ranks that come later. Write `cause(computing, sending)`: "
        "`'imbalance'` or `'communication'`, whichever costs the step more. Imbalance "
        "costs what the slowest rank computes beyond the mean.",
        stub="def cause(computing, sending):\n    ...",
        cases=(
            Case(
                given="equal ranks, half a second of messages",
                args=([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]),
                expected="communication",
            ),
            Case(
                given="one slow rank, others long in collectives",
                args=([1.0, 1.0, 1.0, 2.0], [1.1, 1.1, 1.1, 0.1]),
                expected="imbalance",
            ),
            Case(
                given="a rank a little slow, and long messages",
                args=([1.0, 1.5], [2.5, 2.0]),
                expected="communication",
            ),
            Case(
                given="one quick rank that waits",
                args=([2.0, 2.0, 2.0, 1.0], [0.3, 0.3, 0.3, 1.3]),
                expected="communication",
            ),
        ),
        misconceptions=(
            Misconception(
                lambda computing, sending: (
                    "communication"
                    if sum(sending) > 0.3 * sum(computing)
                    else "imbalance"
                ),
                "time in collectives is mostly waiting if one rank comes late: look at "
                "the rank that waits for nobody",
            ),
            Misconception(
                lambda computing, sending: (
                    "imbalance"
                    if max(computing) - min(computing) > min(sending)
                    else "communication"
                ),
                "a rank that is quicker than the others costs them nothing: compare "
                "with the mean",
            ),
            Misconception(
                lambda computing, sending: (
                    "imbalance"
                    if max(computing) > 1.1 * sum(computing) / len(computing)
                    else "communication"
                ),
                "there is imbalance, but messages cost more: compare the two",
            ),
        ),
        hints=(
            "Which rank waits for nobody? What are its seconds in collectives?",
            "Messages alone take `min(sending)`.",
            "Imbalance costs `max(computing)` less the mean.",
        ),
        solution=cause,
        because="the slowest rank's collectives are short: it is the one waited for.",
    ),
)
