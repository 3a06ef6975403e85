"""Run a function in several processes of this machine, and get every result back.

    results = launch(work, 4, 3)        # [work(3) of rank 0, …, work(3) of rank 3]

`work` may be defined anywhere: in a module, a script or a cell of a notebook. It calls
`torch.distributed` directly, because each process is in the process group already.
Whatever goes wrong in a rank is one `RankFailed` here, and no process outlives the
call, nor the process that made it (`labkit.parallel.worker` says how).
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import cloudpickle
import torch.distributed as dist

from labkit.config.checks import require_above, require_whole
from labkit.parallel.communication.slow_link import Place, SlowLink
from labkit.parallel.failures import Failure, RankFailed, first_of
from labkit.parallel.interrupts import held_interrupts
from labkit.parallel.packing import pack
from labkit.parallel.process import RankProcess, Work, guarded

Result = TypeVar("Result")

LOCALHOST = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

POLL_SECONDS = 0.02
"""Between two looks at the processes."""

SETTLE_SECONDS = 0.2
"""After a failure, so that the one which caused it is seen too."""

ANSWER_SECONDS = 1.5
"""How long ranks that hang have to say where they are."""

LEAVE_SECONDS = 5.0
"""How long ranks have to end once all have handed back their results."""

MARGIN_SECONDS = 30.0
"""A rank waits longer for others than `launch` for it: so `launch` says who hangs."""


def launch(
    fn: Callable[..., Result],
    n_procs: int,
    *args: object,
    timeout: float = 120.0,
    log_dir: str | Path | None = None,
    link: SlowLink | None = None,
) -> list[Result]:
    """Return what `fn(*args)` returns in each of `n_procs` processes, by rank.

    In each, `torch.distributed` is initialised (gloo; with GPUs also NCCL, which has
    not been run), PyTorch has one thread, and collectives are checked against each
    other (TORCH_DISTRIBUTED_DEBUG=DETAIL; what the environment says instead holds).
    Call it from any thread. An interrupt ends the ranks if it reaches the thread that
    waits for them, which Python grants to the main thread alone.

    Args:
        fn: what each rank runs. Functions and classes of importable modules are
            imported there, others are sent along with the globals they use.
        n_procs: how many processes.
        args: the same for all ranks; `functools.partial` takes keywords.
        timeout: seconds until the last result, the start of the ranks included.
        log_dir: a folder for what ranks print, `rank0.log` and so on. Without it only
            the error of a failed rank shows some of it.
        link: joins the ranks as nodes (`labkit.parallel.communication.slow_link`).
            Collectives are then not checked, because the checks would take time on it.

    Raises:
        RankFailed: a rank raised, was killed, left, hung, or returned what cannot be
            sent. The others are ended.
        ValueError: an argument is wrong, or cannot be sent.
    """
    _check(fn, n_procs, timeout)
    if link is not None:
        link.check(n_procs)
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        work = stack.enter_context(_work(fn, args, n_procs, timeout))
        with held_interrupts():
            ranks = [
                stack.enter_context(closing(_start(rank, work, link, log_dir)))
                for rank in range(n_procs)
            ]
            stack.enter_context(guarded(ranks))
            stack.callback(_kill, ranks)  # all at once, before each is waited for
        _wait(ranks, deadline, timeout)
        return [cloudpickle.loads(process.result) for process in ranks]


def _check(fn: object, n_procs: int, timeout: float) -> None:
    if not callable(fn):
        raise ValueError(
            f"fn must be a function that each rank calls; got {fn!r}. Give the "
            "function itself, and its arguments after n_procs."
        )
    require_whole({"n_procs": n_procs})
    require_above({"timeout": timeout}, 0)
    if os.name != "posix":
        raise ValueError(
            f"launch needs Linux or macOS; this is {sys.platform}. On Windows, run "
            "in WSL."
        )


@contextmanager
def _work(fn: Callable, args: tuple, n_procs: int, timeout: float) -> Iterator[Work]:
    """Pack the function, and open the store at which the ranks find each other."""
    with tempfile.TemporaryFile() as file:
        pack(fn, args, file)
        patience = timeout + MARGIN_SECONDS
        store = dist.TCPStore(
            LOCALHOST,
            0,  # a port that the system chooses
            is_master=True,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
        )
        yield Work(file=file, world=n_procs, patience=patience, port=store.port)


def _start(
    rank: int, work: Work, link: SlowLink | None, log_dir: str | Path | None
) -> RankProcess:
    place = Place() if link is None else link.place(rank, work.world)
    log = None
    if log_dir is not None:
        log = Path(log_dir) / f"rank{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
    environment = _environment(rank, work, place)
    return RankProcess(rank, work, place, log=log, environment=environment)


def _environment(rank: int, work: Work, place: Place) -> dict[str, str]:
    """Return the variables of a rank: those of torchrun, and where to import from."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    paths = [path or os.getcwd() for path in sys.path]
    n_local = work.world // place.n_nodes
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": work.world,
        "LOCAL_RANK": rank % n_local,
        "LOCAL_WORLD_SIZE": n_local,
        "GROUP_RANK": rank // n_local,
        "GROUP_WORLD_SIZE": place.n_nodes,
        "MASTER_PORT": place.port or work.port,
        "OMP_NUM_THREADS": 1,
    }
    return (
        {"TORCH_DISTRIBUTED_DEBUG": "OFF" if place.is_timed else "DETAIL"}
        | kept
        | {name: str(number) for name, number in numbers.items()}
        | {
            "MASTER_ADDR": place.host or LOCALHOST,
            "GLOO_SOCKET_IFNAME": place.device or LOOPBACK,
            "PYTHONPATH": os.pathsep.join(paths),
        }
    )


def _wait(ranks: list[RankProcess], deadline: float, timeout: float) -> None:
    """Return once every rank has handed back its result and ended, else raise."""
    while not all(_has_returned(rank) for rank in ranks):
        if any(_has_failed(rank) for rank in ranks):
            time.sleep(SETTLE_SECONDS)
            raise _failed(ranks, timeout)
        if time.monotonic() > deadline:
            raise _failed(ranks, timeout)
        time.sleep(POLL_SECONDS)
    until = time.monotonic() + LEAVE_SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


def _kill(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        rank.kill()


def _has_returned(rank: RankProcess) -> bool:
    return rank.outcome is not None and rank.outcome.kind == "returned"


def _has_failed(rank: RankProcess) -> bool:
    return rank.poll() is not None and not _has_returned(rank)


def _failed(ranks: list[RankProcess], timeout: float) -> RankFailed:
    """Return the error for ranks of which some have failed, or all are late."""
    failures = [rank.failure() for rank in ranks if _has_failed(rank)]
    if all(failure.kind == "echo" for failure in failures):
        failures += _late(ranks, timeout)
    first = first_of(failures)
    others = [failure for failure in failures if failure is not first]
    return RankFailed(first, others, len(ranks))


def _late(ranks: list[RankProcess], timeout: float) -> list[Failure]:
    """Return where those ranks are that still run, as far as they answer."""
    late = [rank for rank in ranks if rank.poll() is None and not _has_returned(rank)]
    for rank in late:
        rank.ask()
    until = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < until and not all(rank.has_answered for rank in late):
        time.sleep(POLL_SECONDS)
    return [rank.hung(timeout) for rank in late]
