"""Signals that stop a run, the exception that they raise, and how a stage delays it to the end of a step."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], None]
# SIGTERM from Slurm, torchrun, Kubernetes and spot machines; SIGUSR1 from Slurm's --signal; SIGHUP from a terminal.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """Raised when a signal stops the run. The state of the run is saved as far as possible."""


def stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise Stopped once, and ignore further signals, because job schedulers repeat them."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped


@contextmanager
def handled(handler: Handler, numbers: Iterable[int] = SIGNALS) -> Iterator[None]:
    """Use a handler for signals inside the context. Signals that nohup or a shell set to be ignored stay ignored."""
    before: dict[int, Any] = {}
    for number in numbers:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler in C
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def delayed(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` for each stop signal inside the context. At its end raise Stopped if there was a signal."""
    received = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        note()

    with handled(handle):
        yield
    if received:
        raise Stopped
