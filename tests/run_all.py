"""Run every check, one step after another, and say at the end how each went.

    python tests/run_all.py [STEP ...]

A step that fails does not stop the next. The exit status is 0 when all passed.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = (
    "--jaxtyping-packages=labkit,"
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)
"""Shapes and types are checked at every call; an int may stand for a float."""
PYTEST = (sys.executable, "-m", "pytest", "-q")
RUFF = (sys.executable, "-m", "ruff")
NBVAL = (
    "--nbval",
    "--nbval-current-env",
    "--nbval-cell-timeout=180",
    "--nbval-sanitize-with=tests/notebooks/sanitize.cfg",
)
BESIDE = ("-n", "2", "--dist", "worksteal")
"""Two processes share the tests, with a core each."""
QUICK = "not compile and not slow"
NO_TESTS = 5
"""Exit status of a pytest that found no test: a failure, for every step has some."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Commands that belong together, and how long they may take."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    minutes: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a step went; `counts` are pytest's."""

    name: str
    verdict: str
    seconds: float
    counts: Counter


def steps() -> list[Step]:
    """Return all steps, in order; together they may take 40 minutes at most."""
    # Shapes are checked on every call, except where torch.compile must see through.
    shaped = (*PYTEST, SHAPES, "-m", "not compile")
    notebooks = sorted(str(path) for path in (ROOT / "notebooks").glob("*.ipynb"))
    style = ((*RUFF, "format", "--check", "."), (*RUFF, "check", "."))
    strict = (*PYTEST, *NBVAL, "tests/notebooks", *(notebooks or ["notebooks/*.ipynb"]))
    return [
        Step(name="style", commands=style, minutes=1),
        Step(
            name="unit",
            commands=((*shaped, *BESIDE, "labkit", "tests/gates", "tests/unit"),),
            minutes=10.5,
        ),
        Step(
            name="compile",
            commands=((*PYTEST, "-m", "compile", "tests/unit"),),
            minutes=1.5,
        ),
        Step(
            name="distributed",
            # What takes longer than all others together is run by hand.
            commands=((*PYTEST, SHAPES, "-m", QUICK, "tests/distributed"),),
            minutes=8,
        ),
        Step(name="notebooks", commands=(strict,), minutes=9),
        Step(name="browser", commands=((*PYTEST, "tests/browser"),), minutes=10),
    ]


def run(step: Step, folder: Path) -> Outcome:
    """Run the step's commands, all of them, within its time."""
    print(f"\n===== {step.name} =====", flush=True)
    start = time.monotonic()
    counts, verdicts = Counter(), []
    for command in step.commands:
        report = folder / f"{step.name}.xml"
        if "pytest" in command:
            command = (*command, f"--junitxml={report}")
        left = step.minutes * 60 - (time.monotonic() - start)
        verdicts.append(_run_command(command, max(left, 1)))
        counts += _count(report)
    verdict = next((text for text in verdicts if text != "passed"), "passed")
    seconds = time.monotonic() - start
    return Outcome(name=step.name, verdict=verdict, seconds=seconds, counts=counts)


def _run_command(command: tuple[str, ...], seconds: float) -> str:
    # A process group of its own, so that what a test started ends with it.
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds / 60:.0f} min"
    finally:
        _end_group(process)
    if status == NO_TESTS:
        return "no tests found"
    return "passed" if status == 0 else f"failed with status {status}"


def _end_group(process: subprocess.Popen) -> None:
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
    else:
        process.kill()
    process.wait()


def _count(report: Path) -> Counter:
    counts = Counter()
    try:
        root = ElementTree.parse(report).getroot()
    except (FileNotFoundError, ElementTree.ParseError):
        return counts  # no pytest, or one that was ended while it ran
    for suite in root.iter("testsuite"):
        number = {key: int(suite.get(key, 0)) for key in ("failures", "errors")}
        counts["failed"] += sum(number.values())
        counts["skipped"] += int(suite.get("skipped", 0))
        counts["passed"] += int(suite.get("tests", 0))
    counts["passed"] -= counts["failed"] + counts["skipped"]
    return counts


def main(names: list[str]) -> int:
    """Run the named steps, or all, and print the summary."""
    known = {step.name: step for step in steps()}
    if unknown := [name for name in names if name not in known]:
        print(f"no step {', '.join(unknown)}; the steps are {', '.join(known)}")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="labkit-tests-"))
    try:
        outcomes = [run(known[name], folder) for name in names or known]
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n===== summary =====")
    for outcome in outcomes:
        print(f"{outcome.name:<12} {outcome.seconds:6.0f} s  {outcome.verdict}")
    total = sum((outcome.counts for outcome in outcomes), Counter())
    failed = [outcome.name for outcome in outcomes if outcome.verdict != "passed"]
    print(f"failed steps: {', '.join(failed)}" if failed else "every step passed")
    # A step can fail without a failed test: then the last line still shows it.
    n_failed = max(total["failed"], len(failed))
    print(f"{total['passed']} passed, {n_failed} failed, {total['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
