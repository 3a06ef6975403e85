"""The process of one rank: `python -m labkit.parallel.worker ORDER`.

It joins the process group, calls the function it was sent, hands back the result and
leaves. It ends with its parent, however that ends: the guard of
`labkit.parallel.process` kills it and all that it has started; on Linux the kernel
kills it too (PR_SET_PDEATHSIG), even before there is a guard.
It leaves by `os._exit`, because threads of gloo may abort an interpreter that ends
in the ordinary way.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from typing import NoReturn

import cloudpickle
import torch
import torch.distributed as dist

from labkit.parallel.communication.slow_link_model import Pace, register
from labkit.parallel.failures import ECHOES
from labkit.parallel.group import join, leave
from labkit.parallel.outcome import Outcome, read_bytes, write_outcome
from labkit.parallel.packing import unpack

PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that a process gets when its parent ends."""


LOCALHOST = "127.0.0.1"


def main(order: dict) -> NoReturn:
    """Work as one rank, and leave."""
    _end_with_parent(order["parent"])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    try:
        result = _result(order)
    except BaseException as error:  # whatever the work raises is the caller's to read
        write_outcome(order["outcome"], _failure(error))
        _exit(1)
    outcome = Outcome(kind="returned", n_bytes=len(result))
    write_outcome(order["outcome"], outcome, result)
    leave()
    _exit(0)


def _result(order: dict) -> bytes:
    """Return what the function returned, ready to be sent."""
    torch.set_num_threads(1)
    fn, args = unpack(read_bytes(order["work"], 0, order["n_bytes"]))
    _join(order)
    value = fn(*args)
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # an object may refuse in any way
        raise UnsendableResult(_refusal(value, error)) from None


class UnsendableResult(TypeError):
    """What the function returned cannot be pickled."""


def _refusal(value: object, error: Exception) -> str:
    return (
        f"returned an object of type {type(value).__name__}, which cannot be pickled "
        f"({type(error).__name__}: {error}); return numbers, tensors or containers"
    )


def _join(order: dict) -> None:
    """Join the group, at the store of the launcher or else of rank 0."""
    rank, world = order["rank"], order["world"]
    patience = timedelta(seconds=order["patience"])
    store = dist.TCPStore(
        order["host"] or LOCALHOST,
        order["port"],
        is_master=order["host"] is not None and rank == 0,
        timeout=patience,
        wait_for_workers=False,
    )
    backend = "gloo"
    if order["bits_per_second"] is not None:
        backend = register(Pace(order["bits_per_second"], order["ranks_per_node"]))
    join(store, rank=rank, world=world, patience=patience, backend=backend)


def _failure(error: BaseException) -> Outcome:
    """Return how the work failed, with the calls from the function on."""
    if isinstance(error, UnsendableResult):
        return Outcome(kind="unsendable", what=str(error), seconds=time.monotonic())
    kind, what = "raised", "raised " + _first_line(error)
    if isinstance(error, SystemExit):
        kind, what = "left", f"called sys.exit({error.code!r})"
    elif _is_echo(error):
        kind = "echo"
    return Outcome(kind=kind, what=what, trace=_trace(error), seconds=time.monotonic())


def _first_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].splitlines()[0]


def _is_echo(error: BaseException) -> bool:
    """Whether communication failed, as it does when another rank has."""
    is_network = isinstance(error, dist.DistError) or type(error) is RuntimeError
    return is_network and ECHOES.search(str(error)) is not None


def _trace(error: BaseException) -> str:
    """Return the traceback without the frames of this file."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frame)))


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this line
        _exit(1)


def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
