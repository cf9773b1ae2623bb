"""Work in a thread of its own."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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


@contextmanager
def uncollected() -> Iterator[None]:
    """Make many objects, all of them needed, without Python looking through all that the process has for rubbish.

    Which takes some tenths of a second where much is imported, and stops every thread.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _do(work: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(work())
    except BaseException as problem:  # torch's CheckpointException is no Exception
        if isinstance(problem, KeyboardInterrupt | SystemExit):
            raise
        future.set_exception(problem)
