"""Ctrl-C that waits for the end of a step."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold back KeyboardInterrupt; yield a function that tells whether one came.

    A second interrupt is not held back. Python delivers interrupts to the main
    thread, so elsewhere there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen = threading.Event()
    previous = signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def hold(signum: int, frame: FrameType | None) -> None:
        seen.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, hold)
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
