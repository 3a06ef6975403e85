r"""What an exercise is, as plain values: a task, cases, hints, known wrong turns.

A module `nNN_topic.py` beside this one lists those of a notebook in `EXERCISES`:

    EXERCISES = (
        Exercise(
            name="double",
            kind="write",
            title="Twice as much",
            difficulty=1,
            minutes=2,
            task="Write `double(x)`, which returns twice `x`.",
            stub="def double(x):\n    ...",
            cases=(Case(given="x=3", args=(3,), expected=6),),
            misconceptions=(
                Misconception(lambda x: x * x, "that is the square"),
                Misconception(lambda x: x + 2, "that adds two"),
            ),
            hints=("Which operator repeats an addition?", "`2 * x`"),
            solution=lambda x: 2 * x,
        ),
    )

Nothing needs registering. The tests prove for each exercise that its solution passes,
that its stub counts as not attempted, and that each misconception gets its message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["write", "fix", "target", "break", "predict"]

KINDS: dict[Kind, str] = {
    "write": "Write the function",
    "fix": "Find the bug",
    "target": "Hit the target",
    "break": "Break it",
    "predict": "Predict, then explain",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing a check looks at, with the value that was computed by hand."""

    given: str
    """The case in a few words: it follows "✗ for"."""

    args: tuple[Any, ...] = ()
    """Arguments for the learner's function; copied for each call."""

    measure: Callable[[Any], Any] | None = None
    """What to look at instead of `answer(*args)`, as a function of the answer."""

    expected: Any = None
    """The value that is right; tensors and arrays are compared as nested lists."""

    at_most: float | None = None
    at_least: float | None = None
    """Bounds, in place of `expected`."""

    otherwise: str = ""
    """What to say after the value, where the bound is the answer and stays unsaid."""

    tolerance: float = 1e-6
    """Relative difference that passes as equal, for numbers with a fraction."""

    unit: str = ""

    def __post_init__(self) -> None:
        rules = [self.expected, self.at_most, self.at_least]
        if sum(rule is not None for rule in rules) != 1:
            raise ValueError(
                "a case has exactly one of expected, at_most and at_least; "
                f"{self.given!r} has {sum(rule is not None for rule in rules)}. "
                "Split it in several cases."
            )


@dataclass(frozen=True, slots=True)
class Misconception:
    """A wrong answer that people give, and what to tell them.

    A learner's answer is recognised by giving the same values in the failing cases.
    """

    answer: Any
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A number that passing answers compete on; the lower one wins by default."""

    of: Callable[[Any], float]
    unit: str
    lower_wins: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Exercise:
    """A task with everything needed to show, check and teach it."""

    name: str
    kind: Kind
    title: str
    difficulty: Literal[1, 2, 3]
    minutes: int
    task: str
    """What to do, in one paragraph; `code` between backticks."""

    stub: str
    """Source of the cell the learner starts from; for "fix", with the bug in it."""

    cases: tuple[Case, ...]
    misconceptions: tuple[Misconception, ...]
    hints: tuple[str, ...]
    """From a nudge to nearly the answer."""

    solution: Any
    """An answer that passes: the library's own function wherever one exists."""

    because: str = ""
    """One sentence shown with the tick and the solution: why it is so."""

    score: Score | None = None
    seconds: float = 10.0
    """Time a check gives the learner's code before it counts as endless."""

    @property
    def wants_function(self) -> bool:
        """Whether the answer is a function to call."""
        return callable(self.solution) and not isinstance(self.solution, type)
