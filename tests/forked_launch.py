"""Run `train.py` in a worker of tests/ranks.py that forks the ranks of each stage instead of starting new interpreters.

The imports of a new interpreter take seconds. A worker has finished them. The ranks are children of the launcher in
their own process groups, with the environment, the arguments and the open files that `subprocess.Popen` gives them.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fork_server import exit_status
from tests.ranks import Worker

FAKE_STAGES = dict.fromkeys(("sft", "reward", "ppo"), "tests.pipeline.launch.fake_stage")
"""Modules for the stages of a run, which do nothing or fail."""


def launch(folder: Path, arguments: Sequence[str], modules: dict[str, str]) -> None:
    """Run a command line in a folder and exit with its status. `modules` replaces the module of some stages."""
    fork_ranks()
    sys.exit(launch_here(folder, arguments, modules))


def fork_ranks() -> None:
    """Let the launcher of this process fork its ranks."""
    from pipeline.launch import processes

    processes.subprocess = FORKING  # type: ignore[attr-defined]


class Launcher:
    """A worker that calls functions one after another, so that only the first command waits for late imports.

    The ranks that these functions start are forked. The functions must be importable.
    """

    def __init__(self, folder: Path) -> None:
        address = str(folder / "launcher")
        with Listener(address, "AF_UNIX") as listener:
            self.worker = Worker(_call_in_turn, address, environment={})
            self._connection = listener.accept()

    def call(self, function: Callable[..., Any], *arguments: Any, environment: dict[str, str]) -> tuple[Any, str]:
        """Return the result of a call, with additional environment variables, and what the call printed."""
        self._connection.send((function, arguments, environment))
        result: tuple[Any, str] = self._connection.recv()
        return result

    def close(self) -> None:
        """End the worker."""
        self._connection.close()
        self.worker.communicate()


def _call_in_turn(address: str) -> None:
    fork_ranks()
    own = dict(os.environ)
    with Client(address, "AF_UNIX") as connection, suppress(EOFError):
        while True:
            function, arguments, environment = connection.recv()
            os.environ.clear()
            os.environ.update(own | environment)
            with tempfile.TemporaryFile() as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                result = function(*arguments)
                sys.stdout.flush()
                sys.stderr.flush()
                output.seek(0)
                connection.send((result, output.read().decode()))


def launch_here(folder: Path, arguments: Sequence[str], modules: dict[str, str]) -> int:
    """Run a command line in a folder and return its status. `modules` replaces the module of some stages."""
    from pipeline.launch import processes
    from pipeline.launch.command import main

    os.chdir(folder)
    processes.MODULES.update(modules)
    return main(arguments)


class ForkedRank:
    """Fork a process for [python, "-P", "-m", module, argument...]. Implements what the launcher uses of Popen."""

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str], stdin: int, pass_fds: Sequence[int], process_group: int
    ) -> None:
        assert command[1:3] == ["-P", "-m"] and stdin == subprocess.DEVNULL and process_group == 0
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as `Popen` does
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            for signal_number in signal.valid_signals():
                if callable(signal.getsignal(signal_number)):  # the launcher's own handlers must not run in the rank
                    signal.signal(signal_number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            start = 3
            for number in sorted(pass_fds):
                os.closerange(start, number)
                start = number + 1
            os.closerange(start, os.sysconf("SC_OPEN_MAX"))
            os._exit(_run_module(command[3:], env))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """Return the exit status, minus the signal that ended the process, or None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the end and return the exit status."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


FORKING = SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL)
"""Replaces `subprocess` in `pipeline/launch/processes.py`."""


def _run_module(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a module as `python -P -m MODULE ARGUMENT...` does, and return the exit status."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    module, *sys.argv[1:] = command
    return exit_status(partial(runpy.run_module, module, run_name="__main__", alter_sys=True))
