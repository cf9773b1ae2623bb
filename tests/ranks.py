"""Run a function on several ranks over Gloo on loopback, each a process that no other test ran in."""

import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
SECONDS = 240  # for a test
_nurseries: list["_Nursery"] = []


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on `size` ranks with the process group up; the results in rank order.

    `function` must be importable (top level of a test module). What a rank raises is raised here.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    while len(_nurseries) < size:
        _nurseries.append(_Nursery())
    started = {}
    try:
        for rank, nursery in enumerate(_nurseries[:size]):
            nursery.start(os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, (function, arguments))
            started[nursery.connection] = rank
        found = _results(started)
        for nursery in _nurseries[:size]:
            nursery.end()
    except BaseException:
        for nursery in _nurseries:
            nursery.close()
        _nurseries.clear()
        raise
    return [found[rank] for rank in range(size)]


def _results(ranks: dict[Connection, int]) -> dict[int, Any]:
    """What each rank returned. Raises AssertionError with the first traceback, and where a rank ends without a word."""
    found: dict[int, Any] = {}
    until = time.monotonic() + SECONDS
    while ranks:
        ready = wait(list(ranks), timeout=max(until - time.monotonic(), 0))
        assert ready, f"no result within {SECONDS} s"
        for connection in ready:
            said, rank = connection.recv(), ranks.pop(connection)
            assert isinstance(said, tuple), f"rank {rank} ended without a result (status {said}); its output says why"
            value, error = said
            if error is not None:
                raise AssertionError(f"rank {rank}:\n{error}")
            found[rank] = torch.load(io.BytesIO(value), weights_only=False)
    return found


class _Nursery:
    """A process of tests/nursery.py, which has imported what ranks need and forks them.

    One for each rank number: so ranks still differ in the order of a set of strings, which they must not lean on.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.nursery", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.child: int | None = None

    def start(self, environment: dict[str, str], task: tuple[Any, ...]) -> None:
        self.connection.send((environment, pickle.dumps(task)))
        self.child = self.connection.recv()

    def end(self) -> None:
        """Let a rank that gave its result come to its end."""
        if not self.connection.poll(10):
            os.kill(self.child, signal.SIGKILL)
        self.connection.recv()
        self.child = None

    def close(self) -> None:
        """Without waiting for a rank that runs."""
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.connection.close()
