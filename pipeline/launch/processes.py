"""Start the ranks of one stage, watch them, end them together.

Each rank is `python -m <module> --worker RUN_DIR` in a process group of its own, so that Ctrl-C reaches the
launcher alone. A rank that fails ends the others within seconds. A launcher that is killed takes its ranks along
(`worker.py`). One that is asked to stop, by a signal or because others were, hands that on as SIGTERM: ranks finish
their step, save, and end. SIGINT ends a rank at once.
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
from typing import Any

from pipeline.config.stages import STAGES
from pipeline.installation import ROOT
from pipeline.launch.failure import (
    ATTEMPT,
    CRASHED,
    FAILURE_PIPE,
    INTERRUPTED,
    LAUNCHER,
    OUT_OF_MEMORY,
    STOPPED,
    USER_ERROR,
)
from pipeline.launch.ranks import Ranks
from pipeline.stages import stop_signals

MODULES = {name: stage.package for name, stage in STAGES.items()} | {"plan": "pipeline.planning"}
LOSSES = {
    "now": "at once, the current step is lost",
    "late": "no step ended in time, the current step is lost",
}
OF_A_STOP = (INTERRUPTED, *(-number for number in stop_signals.SIGNALS))  # a rank's status; the signal came too early
PATIENCE = 600.0
"""Seconds for a step to end and to be saved, before ranks are taken for stuck. Who sends SIGTERM has a limit too."""
GRACE_AFTER_STOP = 30.0  # for the first rank, which has wandb to close, when another has ended as it was asked to
GRACE_AFTER_FAILURE = 5.0
ECHO = 3.0
"""Seconds within which other launchers report what may have caused a crash here."""


@dataclass(frozen=True)
class StageEnd:
    """How a stage ended on this launcher's ranks. `status`: 0, 1 (crash), 2 (the user's mistake), 3 (out of memory, to
    be started again), 130 or 143 (stopped).

    `asked` is the status to end with where this launcher was asked to stop: the stage may have finished all the same.
    """

    status: int
    message: str = ""
    traceback: str = ""
    asked: int = 0


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
    """What came while ranks run. The first signal asks to stop; Ctrl-C after it means now.

    Others that follow mean nothing new: Slurm and service managers send theirs to every process and more than once.
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
        """The exit status of a run that was stopped."""
        return INTERRUPTED if self.first == signal.SIGINT else STOPPED


def launch_stage(
    stage: str,
    run_dir: Path,
    ranks: Ranks,
    *,
    shared_store: bool = False,
    others: Callable[[], str] = str,
) -> StageEnd:
    """Run one stage on this launcher's ranks and wait for its end.

    `shared_store`: the workers join a store that the launchers keep. `others` is asked about every second how other
    launchers fare: "failed" and "memory" end the ranks here, "stopped" asks them to stop.
    """
    signals = _Signals()
    with stop_signals.handled(signals.note, (signal.SIGINT, *stop_signals.SIGNALS)):
        workers = [_start(stage, run_dir, ranks, number, shared_store) for number in range(ranks.local)]
        try:
            how = _watch(workers, signals, others)
            if how == "asked":
                if signals.first is not None and ranks.leads:
                    print(_promise(stage, signals.first), file=sys.stderr, flush=True)
                how = _stop(workers, signals, others)
            end = _judge(workers, signals)
            if how != "done":
                _end(workers, GRACE_AFTER_FAILURE, signals)
            if how in LOSSES:
                return StageEnd(signals.status, LOSSES[how])
            if how == "others":
                end = StageEnd(CRASHED)
            if end.status == CRASHED and shared_store and _others_ran_out_of_memory(others):
                end = StageEnd(OUT_OF_MEMORY)
            return end
        finally:
            _end(workers, 0.0, signals)
            for worker in workers:
                os.close(worker.pipe)


def _others_ran_out_of_memory(others: Callable[[], str]) -> bool:
    """Return whether another launcher's rank ran out of memory: this launcher's ranks then crashed because of that."""
    deadline = time.monotonic() + ECHO
    while (how := others()) == "" and time.monotonic() < deadline:
        time.sleep(0.1)
    return how == "memory"


def _promise(stage: str, asked: signal.Signals) -> str:
    again = "; Ctrl-C again ends at once" if asked == signal.SIGINT else ""
    return f"\n{stage}: {asked.name}: finishes and saves the current step, then stops{again}"


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


def _watch(workers: list[_Worker], signals: _Signals, others: Callable[[], str]) -> str:
    """Wait until all ranks ended ("done"), one failed ("failed"), others failed ("others"), or a stop is asked for, by
    a signal, by other launchers or by a rank that ended for it ("asked").
    """
    looked = time.monotonic()
    while True:
        if signals.first is not None:
            return "asked"
        statuses = [worker.process.poll() for worker in workers]
        if any(status not in (None, 0, INTERRUPTED) for status in statuses):
            time.sleep(0.5)  # whoever failed first has failed by then: the cause is told from its echoes by time
            return "failed"
        if INTERRUPTED in statuses:
            return "asked"
        if all(status == 0 for status in statuses):
            return "done"
        if time.monotonic() - looked > 1.0:
            looked = time.monotonic()
            if (how := others()) != "":
                return "asked" if how == "stopped" else "others"
        time.sleep(0.05)


def _stop(workers: list[_Worker], signals: _Signals, others: Callable[[], str]) -> str:
    """Ask the ranks to stop, and wait until they have ("done"), or for a reason to end them: Ctrl-C once more ("now"),
    a step that takes too long ("late"), a rank that failed ("failed") or others that did ("others").
    """
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGTERM)
    looked = began = time.monotonic()
    first_ended: float | None = None
    while True:
        time.sleep(0.05)
        now, statuses = time.monotonic(), [worker.process.poll() for worker in workers]
        if None not in statuses:
            return "done"
        if signals.now:
            return "now"
        if any(status not in (None, 0, *OF_A_STOP) for status in statuses):
            time.sleep(0.5)
            return "failed"
        ended = [worker.rank for worker, status in zip(workers, statuses, strict=True) if status is not None]
        first_ended = first_ended or (now if ended else None)
        if first_ended is not None and now - first_ended > (GRACE_AFTER_FAILURE if 0 in ended else GRACE_AFTER_STOP):
            return "failed"
        if now - began > PATIENCE:
            return "late"
        if now - looked > 1.0:
            looked = now
            if others() in ("failed", "memory"):
                return "others"


def _judge(workers: list[_Worker], signals: _Signals) -> StageEnd:
    """One end for the stage: a user's mistake first, then a stop, then a killed rank, then the earliest crash."""
    statuses = {worker.rank: worker.process.poll() for worker in workers}
    asked = 0 if signals.first is None else signals.status
    failures = [failure for worker in workers if statuses[worker.rank] and (failure := worker.failure())]
    failures.sort(key=lambda failure: (failure["kind"] != "user", failure["time"]))
    if failures and failures[0]["kind"] == "user":
        return StageEnd(USER_ERROR, failures[0]["message"], failures[0]["traceback"])
    of_a_stop = OF_A_STOP if asked else (INTERRUPTED,)
    if any(status in of_a_stop for status in statuses.values()):  # ranks that crash then lost touch with it
        return StageEnd(signals.status, asked=asked)
    for failure in failures:
        if failure["kind"] == "memory":
            return StageEnd(signals.status if asked else OUT_OF_MEMORY, failure["message"], asked=asked)
    for rank, status in statuses.items():
        if status is not None and status < 0:
            return StageEnd(CRASHED, f"rank {rank} was killed by {_signal_name(-status)}")
    if failures:
        return StageEnd(CRASHED, f"rank {failures[0]['rank']}: {failures[0]['message']}", failures[0]["traceback"])
    for rank, status in statuses.items():
        if status:
            return StageEnd(CRASHED, f"rank {rank} ended with status {status}")
    return StageEnd(0, asked=asked)


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name
    hints = {
        "SIGKILL": " (perhaps out of memory: stage=plan shows which settings fit)",
        "SIGSEGV": " (a crash in a library)",
    }
    return name + hints.get(name, "")


def _end(workers: list[_Worker], grace: float, signals: _Signals) -> None:
    """End what still runs: by SIGINT, and after `grace` seconds or one more Ctrl-C by SIGKILL."""
    running = [worker.process for worker in workers if worker.process.poll() is None]
    if grace:
        for process in running:
            process.send_signal(signal.SIGINT)
    deadline, seen = time.monotonic() + grace, signals.now
    while any(process.poll() is None for process in running):
        if time.monotonic() >= deadline or signals.now > seen:
            break
        time.sleep(0.05)
    for process in running:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
