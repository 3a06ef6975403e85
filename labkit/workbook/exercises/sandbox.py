"""Running a learner's code so that nothing it does can stop the notebook."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

POLL_SECONDS = 0.05
"""How often the waiting side looks up, so that a kernel interrupt gets through."""

STOP_ATTEMPTS = 20


class TimeUp(BaseException):
    """Raised inside code that has run too long; no `except Exception` holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the code ended: with a value, with an error, or not in time."""

    value: Any = None
    error: BaseException | None = None
    is_late: bool = False
    is_running: bool = False
    """Whether it could not be stopped: a call that never returns to Python."""


def run_within(seconds: float, work: Callable[[], Any]) -> Ended:
    """Run `work` and report how it ended, at most about `seconds` later.

    It runs in a thread, which works on every system and in every notebook; a loop in
    Python is stopped by an exception raised inside it.
    """
    ended: list[Ended] = []

    def target() -> None:
        try:
            ended.append(Ended(value=work()))
        except BaseException as error:  # noqa: B036, a learner may even call exit()
            ended.append(Ended(error=error))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    try:
        _wait(thread, seconds)
    except KeyboardInterrupt:
        _stop(thread)
        return Ended(error=KeyboardInterrupt("interrupted"))
    if not thread.is_alive():
        return ended[0]
    return Ended(is_late=True, is_running=not _stop(thread))


def _wait(thread: threading.Thread, seconds: float) -> None:
    """Wait until the thread ends or the time is up."""
    for _ in range(max(1, round(seconds / POLL_SECONDS))):
        thread.join(POLL_SECONDS)
        if not thread.is_alive():
            return


def _stop(thread: threading.Thread) -> bool:
    """Raise `TimeUp` in the thread until it ends; return whether it did."""
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for _ in range(STOP_ATTEMPTS):
        if not thread.is_alive():
            return True
        raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TimeUp))
        thread.join(POLL_SECONDS)
    return not thread.is_alive()
