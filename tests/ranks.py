"""Run a function on several ranks over Gloo on loopback, or in one worker process.

Each rank and each worker is a new process, forked by a server that has finished the imports (tests/fork_server.py).
"""

import fcntl
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

from tests.fork_server import SHARED, share_fork_servers

share_fork_servers()  # pytest has done so already
ROOT = Path(__file__).parents[1]
SECONDS = 240  # limit of one test
FORK_SERVERS = 2  # their hash seeds differ, so sets of strings iterate differently; ranks must not depend on this order
fork_servers: list[subprocess.Popen[bytes]] = []  # those that this process started
SIMULATED = {"SIMULATED_GPUS": "2", "TRITON_INTERPRET": "1"}
"""The environment of processes on simulated devices (tests/simulated_gpu)."""


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, device: str = "cpu", store: TCPStore | None = None
) -> list[Any]:
    """Call `function(*arguments)` on `size` ranks with a process group. Return the results in rank order.

    `function` must be importable (top level of a test module). An exception of a rank raises AssertionError with its
    traceback. `device="cuda"` gives each rank one of two simulated devices (tests/simulated_gpu). `store` is a store
    that other ranks have used before.
    """
    store = store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
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
            started.append(_Rank(number, device))
            started[-1].connection.send((environment, device, task))
        actual = _results({rank.connection: number for number, rank in enumerate(started)})
        for rank in started:
            rank.wait()
    finally:
        for rank in started:
            rank.kill()
    return [actual[number] for number in range(size)]


def _results(ranks: dict[Connection, int]) -> dict[int, Any]:
    """Return the result of each rank. Raise AssertionError if a rank raises or ends without a result."""
    results: dict[int, Any] = {}
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
            results[number] = torch.load(io.BytesIO(value), weights_only=False)
    return results


def _environment_on(device: str) -> dict[str, str]:
    return SIMULATED if device == "cuda" else {}


def _request(rank: int, device: str, descriptors: list[int]) -> None:
    """Send descriptors to a fork server, and start the server if no process of the tests has started it."""
    owner, folder = os.environ[SHARED].split(":", 1)
    path = Path(folder) / f"{device}-{rank % FORK_SERVERS if device == 'cpu' else 0}"
    with open(Path(folder) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _start_fork_server(path, device, owner)
    with socket.socket(socket.AF_UNIX) as request:
        request.connect(str(path))
        socket.send_fds(request, [b"r"], descriptors)


def _start_fork_server(path: Path, device: str, owner: str) -> None:
    """Start tests/fork_server.py. With device="cuda" it loads simulated devices before it imports torch."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        first = ["tests.simulated_gpu.cuda"] if device == "cuda" else []
        command = [sys.executable, "-m", "tests.fork_server", str(listener.fileno()), owner, *first]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | _environment_on(device)
        fork_servers.append(subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[listener.fileno()]))


class _Rank:
    """A rank that a fork server forked, and the connection to it, which closes when the process ends."""

    def __init__(self, number: int, device: str) -> None:
        local_end, remote_end = socket.socketpair()
        _request(number, device, [remote_end.fileno(), 1, 2])
        remote_end.close()
        self.connection = Connection(local_end.detach())
        self.process_id: int | None = self.connection.recv()

    def wait(self) -> None:
        """Let the rank exit after it sent its result. If it still runs after ten seconds, `kill` ends it."""
        self.connection.send("every rank has its result")
        if self.connection.poll(10):
            with suppress(EOFError, ConnectionResetError):
                self.connection.recv()
            self.process_id = None

    def kill(self) -> None:
        """Send SIGKILL to the rank if it still runs, without waiting for its end."""
        if self.process_id is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGKILL)
        self.connection.close()


class Worker:
    """A process that calls `function(*arguments)`, with the methods of subprocess.Popen that tests need.

    The function must be importable. Output and errors are one text. `device` has the meaning of `run_ranks`.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, environment: dict[str, str], device: str = "cpu"
    ) -> None:
        local_end, remote_end = socket.socketpair()
        output, write_end = os.pipe()
        _request(0, device, [remote_end.fileno(), write_end])
        remote_end.close()
        os.close(write_end)
        self._output = os.fdopen(output, "rb")
        self._connection = Connection(local_end.detach())
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
        """Wait for the next line of the output and return it; return "" at the end of the output."""
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
