"""Start the ranks of one stage, watch them, and end them.

Each rank runs `python -m <module> --worker RUN_DIR` in its own process group, so that Ctrl-C reaches only the launcher.
- If one rank fails, the launcher ends the others within seconds.
- If the launcher is killed, its ranks end too (`worker.py`).
- If the launcher or another launcher receives a stop signal, the launcher sends SIGTERM to its ranks. The ranks finish
  their step, save a checkpoint and end.
- SIGINT ends a rank at once.
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
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.config.stages import STAGES
from pipeline.errors import STOP_SIGNALS, handle_signals
from pipeline.installation import ROOT
from pipeline.launch.failure import (
    ATTEMPT,
    CRASHED,
    FAILURE_PIPE,
    FINISHED,
    INTERRUPTED,
    LAUNCHER,
    RESTART,
    STOPPED,
    UNFINISHED,
    USER_ERROR,
)
from pipeline.launch.ranks import Ranks

MODULES = {name: stage.package for name, stage in STAGES.items()} | {"plan": "pipeline.planning"}
PATIENCE = 600.0
"""Seconds for a step to end and its checkpoint to be written. After that the launcher treats the ranks as stuck."""
EARLY_STOP_MESSAGES = {
    "now": "the current step is lost, because Ctrl-C was pressed again",
    "late": f"the current step is lost, because it did not end within {PATIENCE / 60:.0f} minutes",
}
STOPPED_STATUSES = (INTERRUPTED, *(-number for number in STOP_SIGNALS))
"""Exit statuses of a rank that was stopped. The negative ones occur if the signal came before its handler was set."""
GRACE_AFTER_STOP = 30.0  # after another rank has stopped; the first rank needs time to close wandb
GRACE_AFTER_FAILURE = 5.0
REMOTE_REPORT_TIMEOUT = 3.0
"""Seconds to wait after a crash for another launcher's report of the cause."""


@dataclass(frozen=True)
class StageEnd:
    """How a stage ended on this launcher's ranks.

    status: 0 (finished), 1 (crash), 2 (user error), 3 (restart), 130 or 143 (stopped)
    stop_status: the exit status for the launcher if it received a stop signal, else 0. The stage may have finished
        before it reacted to the signal; `status` is 0 in this case.
    """

    status: int
    message: str = ""
    traceback: str = ""
    stop_status: int = 0


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    pipe: int

    def status(self) -> int | None:
        """Return the exit status; None while the process runs, UNFINISHED if it ended early with status 0."""
        status = self.process.poll()
        return UNFINISHED if status == 0 and self.record.get("kind") != FINISHED else status

    @cached_property
    def record(self) -> dict[str, Any]:
        """The record that the rank wrote to its pipe, after its end: an error, or that it has finished the stage."""
        try:
            record: dict[str, Any] = json.loads(os.read(self.pipe, 65536).decode(errors="replace").splitlines()[0])
            return record
        except (OSError, ValueError, IndexError):
            return {}


class _Signals:
    """Record the signals that arrive while ranks run.

    The first signal requests a stop after the current step. A later Ctrl-C requests a stop at once. All other later
    signals are ignored, because Slurm and service managers send a signal to every process, and more than once.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.now = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
        elif number == signal.SIGINT:
            self.now += 1

    @property
    def status(self) -> int:
        """Return the exit status of a stopped run."""
        return INTERRUPTED if self.first == signal.SIGINT else STOPPED


def launch_stage(
    stage: str,
    run_dir: Path,
    ranks: Ranks,
    *,
    shared_store: bool = False,
    others: Callable[[], str] = str,
) -> StageEnd:
    """Run one stage on this launcher's ranks and wait until it ends.

    shared_store: whether the workers join the store of the launchers
    others: returns the state of the other launchers (see `Control.others`) and is called about once a second. "failed"
        and "restart" end the ranks of this launcher; "stopped" stops them after their step.
    """
    signals = _Signals()
    with handle_signals(signals.note, (signal.SIGINT, *STOP_SIGNALS)):
        workers = [_start(stage, run_dir, ranks, number, shared_store) for number in range(ranks.local)]
        try:
            outcome = _watch(workers, signals, others)
            if outcome == "stop":
                if signals.first is not None and ranks.leads:
                    print(_stop_notice(stage, signals.first), file=sys.stderr, flush=True)
                outcome = _stop(workers, signals, others)
            end = _stage_end(workers, signals)
            if outcome != "done":
                _end(workers, GRACE_AFTER_FAILURE, signals)
            if outcome in EARLY_STOP_MESSAGES:
                return StageEnd(signals.status, EARLY_STOP_MESSAGES[outcome])
            if outcome == "others":
                end = StageEnd(CRASHED)
            if end.status == CRASHED and shared_store and _others_restart(others):
                end = StageEnd(RESTART)
            return end
        finally:
            _end(workers, 0.0, signals)
            for worker in workers:
                os.close(worker.pipe)


def _others_restart(others: Callable[[], str]) -> bool:
    """Return whether a rank of another launcher requested a restart, which also crashes the ranks of this launcher."""
    deadline = time.monotonic() + REMOTE_REPORT_TIMEOUT
    while (state := others()) == "" and time.monotonic() < deadline:
        time.sleep(0.1)
    return state == "restart"


def _stop_notice(stage: str, received: signal.Signals) -> str:
    hint = "; press Ctrl-C again to end at once" if received == signal.SIGINT else ""
    return f"\n{stage}: {received.name} received: the ranks finish and save the current step, then stop{hint}"


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
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # on one machine, the host name need not resolve
    return env


def _watch(workers: list[_Worker], signals: _Signals, others: Callable[[], str]) -> str:
    """Wait for the end of the ranks or for a reason to end them, and return which one it was.

    "done": all ranks have ended.
    "failed": a rank of this launcher failed.
    "others": a rank of another launcher failed.
    "stop": a stop was requested, by a signal, by another launcher, or by a rank that ended with INTERRUPTED.
    """
    last_check = time.monotonic()
    while True:
        if signals.first is not None:
            return "stop"
        statuses = [worker.status() for worker in workers]
        if any(status not in (None, 0, INTERRUPTED) for status in statuses):
            time.sleep(0.5)  # the rank that failed first has also ended by then; the earliest time shows the cause
            return "failed"
        if INTERRUPTED in statuses:
            return "stop"
        if all(status == 0 for status in statuses):
            return "done"
        if time.monotonic() - last_check > 1.0:
            last_check = time.monotonic()
            if (state := others()) != "":
                return "stop" if state == "stopped" else "others"
        time.sleep(0.05)


def _stop(workers: list[_Worker], signals: _Signals, others: Callable[[], str]) -> str:
    """Send SIGTERM to the ranks, wait for their end or for a reason to end them, and return which one it was.

    "done": all ranks have ended.
    "now": the user pressed Ctrl-C again.
    "late": the current step took longer than PATIENCE.
    "failed": a rank of this launcher failed.
    "others": a rank of another launcher failed.
    """
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGTERM)
    last_check = began = time.monotonic()
    first_ended: float | None = None
    while True:
        time.sleep(0.05)
        now, statuses = time.monotonic(), [worker.status() for worker in workers]
        if None not in statuses:
            return "done"
        if signals.now:
            return "now"
        if any(status not in (None, 0, *STOPPED_STATUSES) for status in statuses):
            time.sleep(0.5)
            return "failed"
        ended = [worker.rank for worker, status in zip(workers, statuses, strict=True) if status is not None]
        first_ended = first_ended or (now if ended else None)
        if first_ended is not None and now - first_ended > (GRACE_AFTER_FAILURE if 0 in ended else GRACE_AFTER_STOP):
            return "failed"
        if now - began > PATIENCE:
            return "late"
        if now - last_check > 1.0:
            last_check = now
            if others() in ("failed", "restart"):
                return "others"


def _stage_end(workers: list[_Worker], signals: _Signals) -> StageEnd:
    """Combine the results of all ranks into one.

    The first that applies counts: a user error, a stop, a restart, a killed rank, a rank that exited early, the
    earliest crash.
    """
    statuses = {worker.rank: worker.status() for worker in workers}
    stop_status = 0 if signals.first is None else signals.status
    failures = [worker.record for worker in workers if statuses[worker.rank] and "message" in worker.record]
    failures.sort(key=lambda failure: (failure["kind"] != "user", failure["time"]))
    if failures and failures[0]["kind"] == "user":
        return StageEnd(USER_ERROR, failures[0]["message"], failures[0]["traceback"])
    stopped = STOPPED_STATUSES if stop_status else (INTERRUPTED,)
    if any(status in stopped for status in statuses.values()):  # other ranks crash because they lost the stopped rank
        return StageEnd(signals.status, stop_status=stop_status)
    for failure in failures:
        if failure["kind"] == "restart":
            return StageEnd(stop_status or RESTART, failure["message"], stop_status=stop_status)
    for rank, status in statuses.items():
        if status is not None and status < 0:
            return StageEnd(CRASHED, f"rank {rank} was killed by {_signal_name(-status)}")
    for rank, status in statuses.items():
        if status == UNFINISHED:  # other ranks crash because they lost this rank
            return StageEnd(
                CRASHED,
                f"rank {rank} exited before the stage was finished: a function of your own (such as "
                "ppo.reward_function) must not call exit()",
            )
    if failures:
        return StageEnd(CRASHED, f"rank {failures[0]['rank']}: {failures[0]['message']}", failures[0]["traceback"])
    for rank, status in statuses.items():
        if status:
            return StageEnd(CRASHED, f"rank {rank} ended with status {status}")
    return StageEnd(0, stop_status=stop_status)


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name
    hints = {
        "SIGKILL": " (possibly out of host memory: stage=plan shows which settings fit)",
        "SIGSEGV": " (a crash in a native library)",
    }
    return name + hints.get(name, "")


def _end(workers: list[_Worker], grace: float, signals: _Signals) -> None:
    """End the running ranks with SIGINT. Send SIGKILL after `grace` seconds or when the user presses Ctrl-C again."""
    running = [worker.process for worker in workers if worker.process.poll() is None]
    if grace:
        for process in running:
            process.send_signal(signal.SIGINT)
    deadline, earlier_interrupts = time.monotonic() + grace, signals.now
    while any(process.poll() is None for process in running):
        if time.monotonic() >= deadline or signals.now > earlier_interrupts:
            break
        time.sleep(0.05)
    for process in running:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
