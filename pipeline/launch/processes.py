"""Start the ranks of one stage, watch them, end them together.

Each rank is `python -m <module> --worker RUN_DIR` in a process group of its own, so that Ctrl-C reaches the
launcher alone, which passes it on. A rank that fails ends the others within seconds. A launcher that is
killed takes its ranks along (`worker.py`).
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from pipeline.launch.failure import ATTEMPT, CRASHED, FAILURE_PIPE, INTERRUPTED, LAUNCHER, USER_ERROR
from pipeline.launch.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"sft": "step1_sft", "reward": "step2_reward", "ppo": "step3_ppo", "plan": "pipeline.planning"}
GRACE_AFTER_SIGNAL = 20.0
GRACE_AFTER_FAILURE = 5.0


@dataclass(frozen=True)
class StageEnd:
    """How a stage ended on this launcher's ranks. `status` is 0, 1 (crash), 2 (the user's mistake) or 130."""

    status: int
    message: str = ""
    traceback: str = ""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    pipe: int

    def failure(self) -> dict[str, Any] | None:
        """What the rank said before it failed, if it said anything."""
        try:
            said = os.read(self.pipe, 65536).decode(errors="replace").splitlines()
            return json.loads(said[0]) if said else None
        except (OSError, ValueError):
            return None


class _Signals:
    """Remembers SIGINT, SIGTERM and SIGHUP while ranks run; counts, since a second one means now."""

    def __enter__(self) -> Self:
        self.count = 0
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {name: signal.signal(name, self._note) for name in names}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def __exit__(self, *exception: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)


def launch_stage(
    stage: str,
    run_dir: Path,
    ranks: Ranks,
    *,
    shared_store: bool = False,
    others_failed: Callable[[], bool] = lambda: False,
) -> StageEnd:
    """Run one stage on this launcher's ranks and wait for its end.

    `shared_store`: the workers join a store that the launchers keep. `others_failed` is asked about every
    second; True ends the ranks here.
    """
    with _Signals() as signals:
        workers = [_start(stage, run_dir, ranks, number, shared_store) for number in range(ranks.local)]
        try:
            stopped = _watch(workers, signals, others_failed)
            if stopped == "signal":
                _end(workers, GRACE_AFTER_SIGNAL, signals)
                return StageEnd(INTERRUPTED)
            end = _judge(workers)
            if end.status or stopped == "others":
                _end(workers, GRACE_AFTER_FAILURE, signals)
            return StageEnd(CRASHED) if stopped == "others" else end
        finally:
            _end(workers, 0.0, signals)
            for worker in workers:
                os.close(worker.pipe)


def _start(stage: str, run_dir: Path, ranks: Ranks, number: int, shared_store: bool) -> _Worker:
    read_end, write_end = os.pipe()
    fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_NONBLOCK)
    process = subprocess.Popen(
        [sys.executable, "-m", MODULES[stage], "--worker", str(run_dir.resolve())],
        env=_environment(ranks, number, shared_store, write_end),
        stdin=subprocess.DEVNULL,
        pass_fds=(write_end,),
        process_group=0,
    )
    os.close(write_end)
    return _Worker(ranks.first + number, process, read_end)


def _environment(ranks: Ranks, number: int, shared_store: bool, pipe: int) -> dict[str, str]:
    threads = max(1, (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1))
    env = {
        "OMP_NUM_THREADS": str(max(1, threads // ranks.local_world)),
        **os.environ,
        "RANK": str(ranks.first + number),
        "WORLD_SIZE": str(ranks.world),
        "LOCAL_RANK": str(ranks.local_first + number),
        "LOCAL_WORLD_SIZE": str(ranks.local_world),
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": str(ranks.port),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        FAILURE_PIPE: str(pipe),
        LAUNCHER: str(os.getpid()),
        ATTEMPT: ranks.attempt,
    }
    if shared_store:
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if not ranks.given_by and sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no need for its name to resolve
    return env


def _watch(workers: list[_Worker], signals: _Signals, others_failed: Callable[[], bool]) -> str:
    """Wait until all ranks ended ("done"), one failed ("failed"), a signal came ("signal"), or others failed."""
    asked = time.monotonic()
    while True:
        if signals.count:
            return "signal"
        statuses = [worker.process.poll() for worker in workers]
        if any(statuses):
            time.sleep(0.5)  # whoever failed first has failed by then: the cause is told from its echoes by time
            return "signal" if signals.count else "failed"
        if all(status == 0 for status in statuses):
            return "done"
        if time.monotonic() - asked > 1.0:
            asked = time.monotonic()
            if others_failed():
                return "others"
        time.sleep(0.05)


def _judge(workers: list[_Worker]) -> StageEnd:
    """One end for the stage: a user's mistake first, then a killed rank, then the earliest crash."""
    statuses = {worker.rank: worker.process.poll() for worker in workers}
    failures = [failure for worker in workers if statuses[worker.rank] and (failure := worker.failure())]
    failures.sort(key=lambda failure: (failure["kind"] != "user", failure["time"]))
    if failures and failures[0]["kind"] == "user":
        return StageEnd(USER_ERROR, failures[0]["message"], failures[0]["traceback"])
    for rank, status in statuses.items():
        if status is not None and status < 0:
            return StageEnd(CRASHED, f"rank {rank} was killed by {_signal_name(-status)}")
    if failures:
        return StageEnd(CRASHED, f"rank {failures[0]['rank']}: {failures[0]['message']}", failures[0]["traceback"])
    if INTERRUPTED in statuses.values():
        return StageEnd(INTERRUPTED)
    for rank, status in statuses.items():
        if status:
            return StageEnd(CRASHED, f"rank {rank} ended with status {status}")
    return StageEnd(0)


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name
    hints = {"SIGKILL": " (out of memory, if nobody killed it)", "SIGSEGV": " (a crash in a library)"}
    return name + hints.get(name, "")


def _end(workers: list[_Worker], grace: float, signals: _Signals) -> None:
    """End what still runs: ask, wait up to `grace` seconds or until another signal comes, then kill."""
    running = [worker.process for worker in workers if worker.process.poll() is None]
    if grace:
        for process in running:
            process.send_signal(signal.SIGTERM)
    deadline, seen = time.monotonic() + grace, signals.count
    while any(process.poll() is None for process in running):
        if time.monotonic() >= deadline or signals.count > seen:
            break
        time.sleep(0.05)
    for process in running:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
