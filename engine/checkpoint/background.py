"""Work in a thread of its own that gives way to training."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LEAST_PRIORITY = 19  # nice(2)


def behind(work: Callable[[], Any]) -> "Future[Any]":
    """Do it beside training; the future says how it went."""
    future: Future[Any] = Future()

    def run() -> None:
        _give_way()
        _do(work, future)

    threading.Thread(target=run, name="checkpoint").start()
    return future


def now(work: Callable[[], Any]) -> "Future[Any]":
    """Do it at once; the future says how it went as `behind` does."""
    future: Future[Any] = Future()
    _do(work, future)
    return future


def _do(work: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(work())
    except BaseException as problem:  # torch's CheckpointException is no Exception
        if isinstance(problem, KeyboardInterrupt | SystemExit):
            raise
        future.set_exception(problem)


def _give_way() -> None:
    """The lowest priority for this thread alone; Linux has one for each."""
    if sys.platform.startswith("linux"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
