"""The processes of ranks, as seen by the one that started them."""

import json
import linecache
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from labkit.parallel.communication.slow_link import Place
from labkit.parallel.failures import Failure
from labkit.parallel.group import STEP_LINE
from labkit.parallel.interrupts import held_interrupts
from labkit.parallel.outcome import Outcome, read_bytes, read_outcome, read_result

GUARD = 'read _; kill -s KILL -- "$@"'
"""Of a shell: waits for the end of its input, which comes at the latest when the
launcher ends, however it ends, and then kills the process groups it was given."""

LINES_SHOWN = 12
"""Of what a rank printed, how many of the last lines an error shows."""

LOG_READ = 1 << 18
"""Bytes at the end of a log that are searched for the last step."""

LAST_CALL = "in _run_module_as_main"
"""How an answer of faulthandler ends: the outermost call of the main thread."""

N_INNERMOST = 4
"""Innermost calls that may stand for a wait; decorators stand between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What all ranks of a launch are told."""

    file: IO[bytes]
    """The function and its arguments."""

    world: int
    """How many ranks there are."""

    patience: float
    """Seconds that one waits for others."""

    port: int
    """Where the launcher keeps the store at which they find each other."""


class RankProcess:
    """One rank: a process that leads a session of its own, its log, its outcome.

    Args:
        rank: which.
        work: what all are told.
        place: where it is started.
        log: the file for what it prints, or None to keep that without a name.
        environment: the variables that it gets.
    """

    def __init__(
        self,
        rank: int,
        work: Work,
        place: Place,
        *,
        log: Path | None,
        environment: dict[str, str],
    ) -> None:
        self.rank, self.log = rank, log
        self._asked_at = 0
        self._outcome = tempfile.TemporaryFile()  # noqa: SIM115, see close
        self._printed = (  # no name is left behind, whoever is killed
            open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        )
        order = {
            "rank": rank,
            "world": work.world,
            "parent": os.getpid(),
            "work": work.file.fileno(),
            "n_bytes": os.fstat(work.file.fileno()).st_size,
            "outcome": self._outcome.fileno(),
            "patience": work.patience,
            "host": place.host,
            "port": place.port or work.port,
            "ranks_per_node": work.world // place.n_nodes,
            "bits_per_second": place.bits_per_second,
        }
        module = ("-P", "-u", "-m", "labkit.parallel.worker", json.dumps(order))
        self._process = subprocess.Popen(
            (*place.prefix, sys.executable, *module),
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=(order["work"], order["outcome"]),
            env=environment,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Return its exit status, minus the signal if one ended it; None if it runs.

        What it had started ends with it.
        """
        before = self._process.returncode
        status = self._process.poll()
        if before is None and status is not None:
            self._end_session()
        return status

    @property
    def session(self) -> int:
        """The process group of it and of what it has started."""
        return self._process.pid

    @property
    def outcome(self) -> Outcome | None:
        """What it has handed back, if it has."""
        return read_outcome(self._outcome.fileno())

    @property
    def result(self) -> bytes:
        """The result that follows the outcome."""
        return read_result(self._outcome.fileno())

    def kill(self) -> None:
        """End it at once, and all that it has started."""
        if self.poll() is None:
            self._end_session()

    def close(self) -> None:
        """Wait until it is gone, and let go of its files."""
        with held_interrupts():
            self.kill()
            self._process.wait()
            self._outcome.close()
            self._printed.close()

    def failure(self) -> Failure:
        """Return how it failed, once it has ended."""
        outcome = self.outcome
        if outcome is None:
            kind, what = _ending(self._process.returncode)
            outcome = Outcome(kind=kind, what=what)
        return self._as_failure(outcome, self._size())

    def ask(self) -> None:
        """Ask what its threads are doing; it answers in its log, even when it hangs."""
        self._asked_at = self._size()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    @property
    def has_answered(self) -> bool:
        """Whether the answer has come in whole, as far as one can tell."""
        return self._printed_between(self._asked_at).rstrip().endswith(LAST_CALL)

    def hung(self, seconds: float) -> Failure:
        """Return where it is after so many seconds, by its answer."""
        trace = _calls(self._printed_between(self._asked_at))
        where = "did not end"
        if not trace:
            where = "did not end, or even start"
        elif _waits(trace):
            where = "waits for other ranks, and did not end"
        kind = "echo" if _waits(trace) else "hung"
        what = f"{where} within {seconds:.3g} s"
        outcome = Outcome(kind=kind, what=what, trace=trace)
        return self._as_failure(outcome, self._asked_at)

    def _as_failure(self, outcome: Outcome, end: int) -> Failure:
        printed = self._printed_between(max(0, end - LOG_READ), end)
        steps = re.findall(f"^{STEP_LINE.format('([0-9]+)')}", printed, re.MULTILINE)
        return Failure(
            rank=self.rank,
            kind=outcome.kind,
            what=outcome.what,
            seconds=outcome.seconds,
            trace=outcome.trace,
            step=int(steps[-1]) if steps else None,
            printed="\n".join(printed.splitlines()[-LINES_SHOWN:]),
            log=str(self.log) if self.log else None,
        )

    def _printed_between(self, start: int, end: int | None = None) -> str:
        end = self._size() if end is None else end
        return read_bytes(self._printed.fileno(), start, end - start).decode(
            errors="replace"
        )

    def _size(self) -> int:
        return os.fstat(self._printed.fileno()).st_size

    def _end_session(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextmanager
def guarded(ranks: Sequence[RankProcess]) -> Iterator[None]:
    """Keep a guard who ends these ranks if this process ends inside the context."""
    groups = [f"-{rank.session}" for rank in ranks]
    guard = subprocess.Popen(
        ("sh", "-c", GUARD, "sh", *groups),
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()
        guard.stdin.close()


def _ending(status: int) -> tuple[str, str]:
    """Return the kind and the words for a process that handed back nothing."""
    if status >= 0:
        return "left", f"left with exit status {status} and without a result"
    name = signal.Signals(-status).name
    if -status == signal.SIGABRT:
        return "aborted", f"was aborted by a library it runs ({name})"
    hint = ", as happens when memory runs out" if -status == signal.SIGKILL else ""
    return "killed", f"was killed by {name}{hint}"


def _calls(answer: str) -> str:
    """Return the calls of the work alone, from what faulthandler wrote.

    It begins a paragraph for each thread and lists the innermost call first.
    """
    threads = []
    for thread in re.split(r"\n(?=(?:Current thread|Thread) 0x)", "\n" + answer):
        lines = [line for line in thread.splitlines() if line.startswith("  File ")]
        while lines and not _is_of_work(lines[-1]):
            lines.pop()
        if lines:
            threads.append("\n".join(lines))
    if not threads:
        return ""
    return "It is here (innermost call first):\n" + "\n\n".join(threads)


def _is_of_work(line: str) -> bool:
    """Whether a call is one of the work, not of what carries it."""
    carriers = ("labkit/parallel/worker.py", "<frozen runpy>", "threading.py")
    return not any(carrier in line for carrier in carriers)


def _waits(trace: str) -> bool:
    """Whether the innermost calls of a thread wait for another rank."""
    for thread in trace.split("\n\n"):
        calls = [line for line in thread.splitlines() if line.startswith("  File ")]
        if any("torch/distributed/" in call for call in calls[:N_INNERMOST]):
            return True
        if calls and ".wait(" in _source(calls[0]):
            return True
    return False


def _source(call: str) -> str:
    """Return the line of source that a call names, if it can be read."""
    found = re.match(r'  File "(.*)", line (\d+) in ', call)
    return linecache.getline(found[1], int(found[2])) if found else ""
