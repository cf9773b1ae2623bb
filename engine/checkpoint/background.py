"""Work in a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def behind(work: Callable[[], Any]) -> "Future[Any]":
    """Do it beside training; the future says how it went."""
    future: Future[Any] = Future()

    threading.Thread(target=_do, args=(work, future), name="checkpoint").start()
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
