"""Run a function on several ranks over Gloo on loopback, or in a worker, each a process that no other test ran in."""

import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[1]
SECONDS = 240  # for a test
NURSERIES = 2  # two differ in the order of a set of strings, on which ranks must not depend
_nurseries: dict[tuple[str, int], "_Nursery"] = {}
PRETENDED = {"PRETENDED_GPUS": "2", "TRITON_INTERPRET": "1"}
"""The environment of processes on pretended devices (tests/pretended_gpu)."""


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any, device: str = "cpu") -> list[Any]:
    """Call `function(*arguments)` on `size` ranks with the process group up; the results in rank order.

    `function` must be importable (top level of a test module). What a rank raises is raised here. `device="cuda"` gives
    each rank a pretended device, of which there are two (tests/pretended_gpu).
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        **_environment_on(device),
    }
    task = pickle.dumps((function, arguments))
    started: list[_Rank] = []
    try:
        for number in range(size):
            environment = os.environ | shared | {"RANK": str(number), "LOCAL_RANK": str(number)}
            started.append(_Rank(_nursery(number, device)))
            started[-1].connection.send((environment, device, task))
        found = _results({rank.connection: number for number, rank in enumerate(started)})
        for rank in started:
            rank.wait()
    finally:
        for rank in started:
            rank.kill()
    return [found[number] for number in range(size)]


def _results(ranks: dict[Connection, int]) -> dict[int, Any]:
    """Return what each rank returned. Raise AssertionError if a rank raises, or ends without a result."""
    found: dict[int, Any] = {}
    until = time.monotonic() + SECONDS
    while ranks:
        ready = wait(list(ranks), timeout=max(until - time.monotonic(), 0))
        assert ready, f"no result within {SECONDS} s"
        for connection in ready:
            number = ranks.pop(connection)
            try:
                value, error = connection.recv()
            except (EOFError, ConnectionResetError):
                raise AssertionError(f"rank {number} ended without a result; its output gives the reason") from None
            if error is not None:
                raise AssertionError(f"rank {number}:\n{error}")
            found[number] = torch.load(io.BytesIO(value), weights_only=False)
    return found


def _environment_on(device: str) -> dict[str, str]:
    return PRETENDED if device == "cuda" else {}


def _nursery(rank: int, device: str) -> "_Nursery":
    key = device, rank % NURSERIES if device == "cpu" else 0
    if key not in _nurseries:
        _nurseries[key] = _Nursery(device)
    return _nurseries[key]


class _Nursery:
    """A process of tests/nursery.py. With device="cuda" it has pretended devices, which load before torch."""

    def __init__(self, device: str) -> None:
        self.control, theirs = socket.socketpair()
        first = ["tests.pretended_gpu.cuda"] if device == "cuda" else []
        command = [sys.executable, "-m", "tests.nursery", str(theirs.fileno()), *first]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | _environment_on(device)
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()


class _Rank:
    """A process that a nursery forked, and the connection to it, which closes when the process ends."""

    def __init__(self, nursery: _Nursery) -> None:
        ours, theirs = socket.socketpair()
        socket.send_fds(nursery.control, [b"r"], [theirs.fileno()])
        theirs.close()
        self.connection = Connection(ours.detach())
        self.process_id: int | None = self.connection.recv()

    def wait(self) -> None:
        """Let the rank, which gave its result, end, and wait for it; kill it after ten seconds."""
        self.connection.send("every rank has its result")
        if self.connection.poll(10):
            with suppress(EOFError, ConnectionResetError):
                self.connection.recv()
            self.process_id = None

    def kill(self) -> None:
        """End the rank without waiting, if it still runs."""
        if self.process_id is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGKILL)
        self.connection.close()


class Worker:
    """A process that calls `function(*arguments)`, with the methods of subprocess.Popen that tests need.

    The function must be importable. Output and errors arrive as one text. `device` is that of `run_ranks`.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, environment: dict[str, str], device: str = "cpu"
    ) -> None:
        ours, theirs = socket.socketpair()
        output, its_output = os.pipe()
        socket.send_fds(_nursery(0, device).control, [b"w"], [theirs.fileno(), its_output])
        theirs.close()
        os.close(its_output)
        self._output = os.fdopen(output, "rb")
        self._connection = Connection(ours.detach())
        environment = os.environ | _environment_on(device) | environment
        self._connection.send((environment, pickle.dumps((function, arguments))))
        self.pid: int = self._connection.recv()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, minus the signal that ended the process, or None while the process runs."""
        if self.returncode is None and self._connection.poll():
            self.returncode = self._connection.recv()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def read_line(self) -> str:
        """Wait for the next line of the output; "" at its end."""
        return self._output.readline().decode()

    def communicate(self, timeout: float = SECONDS) -> tuple[str, None]:
        """Return the output when the process has ended. Kill it, and raise AssertionError, after `timeout` seconds."""
        timer = threading.Timer(timeout, self.send_signal, [signal.SIGKILL])
        timer.start()
        with self._output:
            output = self._output.read().decode()
        self.returncode = self._connection.recv() if self.returncode is None else self.returncode
        assert timer.is_alive(), f"the worker did not end within {timeout} s:\n{output}"
        timer.cancel()
        self._connection.close()
        return output, None
