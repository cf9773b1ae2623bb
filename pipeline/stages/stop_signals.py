"""How a run is asked to stop: by which signals, what they raise, and how the steps of a stage put that off."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], None]
# Of Slurm, torchrun, Kubernetes, spot machines; of Slurm's --signal; of a terminal that is closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and what can be kept is kept."""


def stop(number: int, frame: FrameType | None) -> None:
    """A handler: ends what is under way. Raises Stopped, once: those who send signals may repeat themselves."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped


@contextmanager
def handled(handler: Handler, numbers: Iterable[int] = SIGNALS) -> Iterator[None]:
    """Have signals handled so within the block. One that is ignored stays so: nohup, or a shell, wanted that."""
    before: dict[int, Any] = {}
    for number in numbers:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not Python's
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def put_off(note: Callable[[], None]) -> Iterator[None]:
    """Within the block a signal to stop is noted only, by `note`; at its end Stopped is raised where one came."""
    came = False

    def noted(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        note()

    with handled(noted):
        yield
    if came:
        raise Stopped
