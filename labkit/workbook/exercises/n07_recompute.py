"""Exercises of notebook 07: what policies keep and cost, and a run that differs."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from labkit.config import PRESETS, TrainConfig
from labkit.memory import predict
from labkit.memory.cost import recompute_cost
from labkit.memory.recompute import block_policies
from labkit.workbook.exercises.spec import Case, Exercise, Misconception, Score

SMALL = PRESETS["small"]
RECIPE = TrainConfig(micro_batch=16, global_batch=16, seq_len=256)
N_BLOCKS = SMALL.n_layers + SMALL.n_mtp

MB = 10**6


def kept(n_blocks: int, k: int, plain: int, again: int) -> int:
    """Return what all blocks keep, if the first of every k runs again."""
    n_again = -(-n_blocks // k)
    return (n_blocks - n_again) * plain + n_again * again


Block = Callable[[Tensor], Tensor]
Run = Callable[[Block, Tensor], tuple[Tensor, Tensor]]
"""What the exercise on randomness asks for."""


def run_twice(
    block: Block, x: Float[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Return block(x) and the gradient of its sum, keeping nothing but x."""
    state = torch.get_rng_state()
    with torch.no_grad():
        out = block(x)
    x = x.detach().requires_grad_()
    torch.set_rng_state(state)
    block(x).sum().backward()
    return out, x.grad


def _seeded(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        out = block(x)
    x = x.detach().requires_grad_()
    torch.manual_seed(0)
    block(x).sum().backward()
    return out, x.grad


def _put_back(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.get_rng_state()
    result = run_twice(block, x)
    torch.set_rng_state(state)
    return result


def _keep_the_graph(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = block(x)
    out.sum().backward()
    return out.detach(), x.grad


def _take_the_second(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        block(x)
    x = x.detach().requires_grad_()
    out = block(x)
    out.sum().backward()
    return out.detach(), x.grad


def drop(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Return x with half of its values dropped by chance, the others doubled."""
    return torch.nn.functional.dropout(x, p=0.5, training=True)


ONES = torch.ones(64)


def n_runs(run: Run) -> int:
    """Return how often the block runs."""
    calls = []

    def block(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        calls.append(x)
        return x.square()

    run(block, ONES)
    return len(calls)


def n_wrong_gradients(run: Run) -> int:
    """Return how many values of a dropped input get another's gradient.

    A value that was dropped has gradient 0, and the others 2: what the block gave.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        out, grad = run(drop, ONES)
    return int((out != grad).sum())


def second_mask(run: Run) -> str:
    """Return whether a second call of the block drops the same values."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        first, second = (run(drop, ONES)[0] for _ in range(2))
    return "as before" if torch.equal(first, second) else "anew"


def is_fresh_afterwards(run: Run) -> str:
    """Return from where randomness goes on after a call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        run(drop, ONES)
        found = torch.rand(4)
        torch.manual_seed(1)
        drop(ONES)
        after_one = torch.rand(4)
        torch.manual_seed(1)
        at_start = torch.rand(4)
    if torch.equal(found, after_one):
        return "after one run"
    return "before the run" if torch.equal(found, at_start) else "elsewhere"


def n_names(policies: str | Sequence[str]) -> int:
    """Return how many blocks the policies are for."""
    return N_BLOCKS if isinstance(policies, str) else len(policies)


def peak(policies: str | Sequence[str]) -> float:
    """Return the predicted peak of a step, in MB (10⁶ bytes)."""
    return predict(SMALL, RECIPE, recompute=policies).peak / MB


def extra_time(policies: str | Sequence[str]) -> float:
    """Return the predicted extra time of a step, in per cent."""
    return 100 * recompute_cost(SMALL, RECIPE, policies)


FIRST_TWO = ("full",) * 2 + ("selective",) * 5
LAST_TWO = ("selective",) * 5 + ("full",) * 2

EXERCISES = (
    Exercise(
        name="kept_by_every_k",
        kind="write",
        title="What every k-th block leaves",
        difficulty=1,
        minutes=5,
        task="Write `kept(n_blocks, k, plain, again)`: the bytes that all blocks "
        "together keep, if the first of every k blocks runs again and keeps `again` "
        "bytes, and each of the others keeps `plain` bytes.",
        stub="def kept(n_blocks, k, plain, again):\n    ...",
        cases=(
            Case(given="8 blocks, every 4th", args=(8, 4, 20, 1), expected=122),
            Case(given="61 blocks, every 4th", args=(61, 4, 20, 1), expected=916),
            Case(given="5 blocks, each of them", args=(5, 1, 20, 1), expected=5),
            Case(given="3 blocks, every 8th", args=(3, 8, 20, 1), expected=41),
        ),
        misconceptions=(
            Misconception(
                lambda n, k, plain, again: n * plain // k,
                "that keeps every k-th block and nothing of the others: it is the "
                "k-th that runs again",
            ),
            Misconception(
                lambda n, k, plain, again: (n - n // k) * plain + n // k * again,
                "the first of every k runs again, so the last few blocks have one "
                "too: round up",
            ),
            Misconception(
                lambda n, k, plain, again: (
                    -(-n // k) * plain + (n - -(-n // k)) * again
                ),
                "that runs all but every k-th block again",
            ),
            Misconception(
                lambda n, k, plain, again: (n - -(-n // k)) * plain,
                "a block that runs again still keeps its input",
            ),
        ),
        hints=(
            "How many blocks of 61 run again, if the first of every four does?",
            "`-(-n_blocks // k)` rounds up.",
            "`(n_blocks - n_again) * plain + n_again * again`",
        ),
        solution=kept,
        because="the blocks that run only once still keep everything.",
    ),
    Exercise(
        name="a_quarter_again",
        kind="predict",
        title="A quarter of the blocks, again",
        difficulty=1,
        minutes=3,
        task="A model's backward pass costs twice its forward pass, and nearly all of "
        "both is in its blocks. Every fourth block runs its forward again. By how many "
        "per cent does the work of a training step grow? A guess within a twentieth "
        "counts.",
        stub="percent = None",
        cases=(Case(given="", expected=8.33, tolerance=0.05, unit="%"),),
        misconceptions=(
            Misconception(
                25,
                "a quarter of the forward is run again, but the forward is only a "
                "third of a step",
            ),
            Misconception(0.0833, "that is a share of the step: give per cent"),
            Misconception(
                33.3, "that is every block's forward: only a fourth runs again"
            ),
            Misconception(
                12.5, "that is a quarter of the forward by the backward, not by both"
            ),
        ),
        hints=(
            "Forward, backward and what runs again: 1, 2 and how much?",
            "A quarter of 1, divided by 3.",
        ),
        solution=8.33,
        because="25 % is the growth of the forward pass alone.",
    ),
    Exercise(
        name="the_same_again",
        kind="fix",
        title="The same again, please",
        difficulty=2,
        minutes=10,
        task="`run_twice` keeps only `x`, and runs the block again for the gradient. "
        "For most blocks that works. With dropout in the block training gets worse, "
        "and no error tells why. Find the bug.",
        stub='''def run_twice(block, x):
    """Return block(x) and the gradient of its sum, keeping nothing but x."""
    with torch.no_grad():
        out = block(x)
    x = x.detach().requires_grad_()
    block(x).sum().backward()
    return out, x.grad''',
        cases=(
            Case(given="how often the block runs", measure=n_runs, expected=2),
            Case(
                given="gradients that do not fit the result, of 64 with dropout",
                measure=n_wrong_gradients,
                expected=0,
            ),
            Case(
                given="what a second call drops",
                measure=second_mask,
                expected="anew",
            ),
            Case(
                given="where random numbers go on",
                measure=is_fresh_afterwards,
                expected="after one run",
            ),
        ),
        misconceptions=(
            Misconception(
                _take_the_second,
                "result and gradient fit, but the result was given on before the "
                "second run: the second must repeat the first",
            ),
            Misconception(
                _seeded,
                "a seed of your own makes both runs alike, and every later call too: "
                "remember the state that was there",
            ),
            Misconception(
                _put_back,
                "now the second run fits, but the next block starts from the same "
                "state again: go on from where one run ends",
            ),
            Misconception(
                _keep_the_graph,
                "that keeps all that autograd saves: the block must run again",
            ),
        ),
        hints=(
            "Which values does dropout drop the second time?",
            "`torch.get_rng_state()` remembers where random numbers are.",
            "Remember the state before the first run, and set it before the second.",
        ),
        solution=run_twice,
        because="what runs again must be the same function, chance included.",
    ),
    Exercise(
        name="fit_the_budget",
        kind="target",
        title="420 MB, and not much more time",
        difficulty=3,
        minutes=12,
        task="Training `small` with 16 sequences of 256 tokens peaks at 746 MB. Give "
        "one policy for each of its seven blocks (six layers, then the MTP module), so "
        "that the predicted peak is at most 420 MB for at most 15 % more time. The "
        "names: none, full, selective, attention, moe.",
        stub="policies = None",
        cases=(
            Case(given="the names", measure=n_names, expected=7),
            Case(given="the peak", measure=peak, at_most=420, unit="MB"),
            Case(given="the extra time", measure=extra_time, at_most=15, unit="%"),
        ),
        misconceptions=(
            Misconception(
                ("full",) * 7, "every block twice fits, and pays for what is not needed"
            ),
            Misconception(
                ("selective",) * 7,
                "the cheap modules alone do not save enough: let some blocks run again",
            ),
            Misconception(
                block_policies("every_k", 7),
                "blocks that run once keep everything: first make all of them keep "
                "less",
            ),
            Misconception(
                LAST_TWO,
                "the last blocks are rebuilt first, while all others still wait: "
                "let the first ones run again",
            ),
        ),
        hints=(
            "`selective` costs least per byte: start with it in all blocks.",
            "A block that is `full` is rebuilt in the backward. When is the least kept "
            "beside it?",
            "Two blocks are enough, if they are early ones.",
        ),
        solution=FIRST_TWO,
        because="the first blocks are rebuilt last, when the others are gone.",
        score=Score(of=extra_time, unit="% more time"),
    ),
)
