"""The exceptions and the signals that end a stage, and the parser of the commands with options."""

import argparse
import errno
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
# SIGTERM from Slurm, torchrun, Kubernetes and spot machines; SIGUSR1 from Slurm's --signal; SIGHUP from a terminal.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class UserError(ValueError):
    """An error that the user can correct. The commands print its message without a traceback and exit with status 2.

    The message has one paragraph: what is wrong, why, and what to type instead. Control characters are escaped, because
    a message may quote a data file, a service or a model.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class OptionParser(argparse.ArgumentParser):
    """A parser whose error about an unknown word also explains how options are written."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += "; write options as --NAME VALUE (--help lists them)"
        super().error(message)


def printable(text: str) -> str:
    """Return a text with escapes for control characters, which a terminal would obey. Line breaks and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def first_line(problem: BaseException) -> str:
    """Return the first line of an error of a library; the name of its type if it has no text."""
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__)


def kind_and_line(problem: BaseException) -> str:
    """Return the type and the first line of an error of a library: "OSError: no such file"."""
    line, kind = first_line(problem), type(problem).__name__
    return kind if line == kind else f"{kind}: {line}"


def exit_status(command: Callable[[], int], *, debug: bool = False) -> int:
    """Run a command and return its exit status: 2 after an error that the user can solve, and 130 after Ctrl-C.

    Such an error is a UserError or an OSError with advice. It is printed, with `debug` after its traceback. The status
    is 1 if the program that reads the output has ended (for example `head`).
    """
    print_any_text()
    try:
        status = command()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        discard_output()
        return 1
    except (UserError, OSError) as problem:
        from pipeline.launch.failure import advise  # it imports this module

        if (advice := advise(problem)) is None:
            raise
        if debug:
            traceback.print_exc()
        print(f"error: {advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def print_any_text() -> None:
    """Print escapes for characters that stdout cannot encode, for example with LC_ALL=en_US (ISO 8859-1)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # the descriptor was a file when Python opened it, and is a pipe now
            sys.stdout.reconfigure(errors="backslashreplace")


def discard_output(descriptor: int = 1) -> None:
    """Discard what is still written to a stream whose reader has ended. Python flushes stdout once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class _Output(io.FileIO):
    """Standard output or error of a run: an ended reader is a stop signal and no error of the write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as problem:
            if problem.errno not in (errno.EPIPE, errno.EIO):  # a pipe without a reader, a closed terminal
                raise
            discard_output(self.fileno())
            signal.raise_signal(signal.SIGHUP)
            return len(data)


def stop_without_reader() -> None:
    """Make this process receive SIGHUP when the reader of its output has ended. Its handler must be set.

    Ctrl-C also ends the `tee` behind a pipe, and a closed terminal accepts no output. The ranks must still save their
    step, and the launcher must wait for them.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # not a stream that replaces the standard one
            stream.flush()
            output = _Output(stream.fileno(), "w", closefd=False)
            text = io.TextIOWrapper(output, stream.encoding, stream.errors, line_buffering=True, write_through=True)
            setattr(sys, name, text)


class SharedError(UserError):
    """A UserError that every rank raises at the same point, so that all ranks can still finish collective work."""


class RestartStage(Exception):
    """The stage must start again. Its folder has the changes for the next start (`pipeline/stages/restart.py`)."""


class Stopped(KeyboardInterrupt):
    """Raised when a signal stops the run. The state of the run is saved as far as possible."""


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise Stopped once, and ignore further signals, because job schedulers repeat them."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped


@contextmanager
def handle_signals(handler: Handler, numbers: Iterable[int] = STOP_SIGNALS) -> Iterator[None]:
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
def delay_stop(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` for each stop signal inside the context. At its end raise Stopped if there was a signal."""
    received = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        note()

    with handle_signals(handle):
        yield
    if received:
        raise Stopped
