"""Start the ranks of one stage, watch them, and end them.

Each rank runs `python -m <module> --worker RUN_DIR` in its own process group, so that Ctrl-C reaches only the launcher.
- If one rank fails, the launcher ends the others within seconds.
- If no rank makes progress for too long, the launcher ends all ranks (`watchdog.py`, `control.py`).
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
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.config.stages import STAGES
from pipeline.errors import STOP_SIGNALS, handle_signals, stop_without_reader
from pipeline.installation import ROOT
from pipeline.launch.failure import (
    ATTEMPT,
    CRASHED,
    END_ORDER,
    FAILURE_PIPE,
    INTERRUPTED,
    LAUNCHER,
    LOG_LEVEL,
    RESTART,
    STACK,
    STOPPED,
    UNFINISHED,
    USER_ERROR,
    StageEnd,
    merge_ends,
)
from pipeline.launch.ranks import Ranks, allocator_settings, may_have_gpus, thread_settings
from pipeline.launch.watchdog import LongSteps, RankState, RankWatch
from pipeline.progress import DESCRIPTOR

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
LOOK_PERIOD = 0.5  # seconds between two looks at the progress of the ranks
KILL_TIMEOUT = 10.0  # a process that waits for a broken disk does not end
Others = Callable[[Sequence[RankState]], str]


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    pipe: int
    watch: RankWatch

    def close(self) -> None:
        os.close(self.pipe)
        self.watch.close()

    def status(self) -> int | None:
        """Return the exit status; None while the process runs, UNFINISHED if it ended early with status 0."""
        status = self.process.poll()
        return UNFINISHED if status == 0 and self.record.get("status") != 0 else status

    @cached_property
    def record(self) -> dict[str, Any]:
        """The record that the rank wrote to its pipe, after its end: an error, or that it has finished the stage."""
        try:
            record: dict[str, Any] = json.loads(os.read(self.pipe, 65536).partition(b"\n")[0])
            return record
        except (OSError, ValueError):
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
    others: Others = lambda states: "",
) -> StageEnd:
    """Run one stage on this launcher's ranks and wait until it ends.

    shared_store: whether the workers join the store of the launchers
    others: gets what the ranks of this launcher do and returns the verdict on the stage (see `Control.others`); called
        about twice a second. "failed" and "restart" end the ranks of this launcher; "stopped" stops them after their
        step.
    """
    signals, memory_kills = _Signals(), count_out_of_memory_kills()
    place = "" if ranks.local == ranks.world else f" (host {socket.gethostname()})"
    with handle_signals(signals.note, (signal.SIGINT, *STOP_SIGNALS)):
        stop_without_reader()
        threads = thread_settings(ranks.local_world, os.environ)
        workers = [_start(stage, run_dir, ranks, number, shared_store, threads) for number in range(ranks.local)]
        long_steps = LongSteps(stage)

        def look() -> str:
            states = [worker.watch.look(worker.process.pid) for worker in workers if worker.process.poll() is None]
            if states and states[0].rank == 0:
                long_steps.show(states[0])
            return others(states)

        try:
            outcome = _wait(workers, signals, look, notice=partial(_print_stop, stage) if ranks.leads else None)
            end = _stage_end(workers, signals, place, memory_kills)
            if outcome != "done":
                _end(workers, GRACE_AFTER_FAILURE, signals)
            if outcome in EARLY_STOP_MESSAGES:
                return StageEnd(signals.status, EARLY_STOP_MESSAGES[outcome], order=END_ORDER["stopped"])
            if outcome == "others":
                stop_status = 0 if signals.first is None else signals.status
                return StageEnd(CRASHED, stop_status=stop_status, order=END_ORDER["consequence"])
            return end
        finally:
            _end(workers, 0.0, signals)
            for worker in workers:
                worker.close()


def _print_stop(stage: str, received: signal.Signals) -> None:
    text = f"\n{stage}: {received.name} received"
    if stage != "plan":
        hint = "; press Ctrl-C again to end at once" if received == signal.SIGINT else ""
        text += f": the ranks finish and save the current step, then stop{hint}"
    print(text, file=sys.stderr, flush=True)


def _start(
    stage: str, run_dir: Path, ranks: Ranks, number: int, shared_store: bool, threads: Mapping[str, str]
) -> _Worker:
    read_end, write_end = os.pipe()
    fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_NONBLOCK)
    watch = RankWatch(ranks.first + number)
    row, stack = watch.descriptors
    env = _environment(ranks, number, shared_store, threads) | {FAILURE_PIPE: str(write_end), DESCRIPTOR: str(row)}
    if may_have_gpus():
        # Settings of the user have priority.
        env = watch.flight_recorder(run_dir / stage) | allocator_settings(env) | env
    process = subprocess.Popen(
        # -P: a file or folder of the user, such as engine.py, does not replace a package of the same name.
        [sys.executable, "-P", "-m", MODULES[stage], "--worker", str(run_dir.resolve())],
        env=env | {STACK: str(stack)},
        stdin=subprocess.DEVNULL,
        pass_fds=(write_end, row, stack),
        process_group=0,
    )
    os.close(write_end)
    return _Worker(ranks.first + number, process, read_end, watch)


def _environment(ranks: Ranks, number: int, shared_store: bool, threads: Mapping[str, str]) -> dict[str, str]:
    env = {
        **threads,
        LOG_LEVEL: "ERROR",
        **os.environ,
        "RANK": str(ranks.first + number),
        "WORLD_SIZE": str(ranks.world),
        "LOCAL_RANK": str(ranks.local_first + number),
        "LOCAL_WORLD_SIZE": str(ranks.local_world),
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": str(ranks.port),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(os.getpid()),
        ATTEMPT: ranks.attempt,
    }
    if shared_store:
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return env


def _wait(
    workers: list[_Worker],
    signals: _Signals,
    look: Callable[[], str],
    *,
    notice: Callable[[signal.Signals], None] | None,
) -> str:
    """Wait for the end of the ranks or for a reason to end them, and return which one it was.

    A signal, another launcher, or a rank that ended with INTERRUPTED requests a stop. Then all ranks get SIGTERM, and
    the wait continues. `look` returns the verdict on the stage. `notice` prints the signal that requested the stop.

    "done": all ranks have ended.
    "failed": a rank of this launcher failed.
    "others": a rank of another launcher failed, or the stage hangs.
    "now": the user pressed Ctrl-C again.
    "late": after a stop, the current step took longer than PATIENCE.
    """
    stopped_at: float | None = None
    first_ended: float | None = None
    last_check = time.monotonic()
    while True:
        time.sleep(0.05)
        now, statuses = time.monotonic(), [worker.status() for worker in workers]
        is_stopping = stopped_at is not None or signals.first is not None
        if any(status not in (None, 0, *(STOPPED_STATUSES if is_stopping else (INTERRUPTED,))) for status in statuses):
            time.sleep(0.5)  # the rank that failed first has also ended by then; the earliest time shows the cause
            return "failed"
        if None not in statuses:
            return "done"
        verdict = ""
        if now - last_check > LOOK_PERIOD:
            last_check, verdict = now, look()
        if verdict in ("failed", "restart"):
            return "others"
        if stopped_at is None:
            if not is_stopping and verdict != "stopped" and INTERRUPTED not in statuses:
                continue
            stopped_at = now
            if signals.first is not None and notice is not None:
                notice(signals.first)
            for worker in workers:
                if worker.process.poll() is None:
                    worker.process.send_signal(signal.SIGTERM)
        if signals.now:
            return "now"
        ended = [worker.rank for worker, status in zip(workers, statuses, strict=True) if status is not None]
        first_ended = first_ended or (now if ended else None)
        if first_ended is not None and now - first_ended > (GRACE_AFTER_FAILURE if 0 in ended else GRACE_AFTER_STOP):
            return "failed"
        if now - stopped_at > PATIENCE:
            return "late"


def _stage_end(workers: list[_Worker], signals: _Signals, place: str, out_of_memory_kills: int | None) -> StageEnd:
    """Return the end of the rank that explains the others (`END_ORDER`).

    place: text after the number of a rank
    out_of_memory_kills: the count of the kernel when the ranks started
    """
    stop_status = 0 if signals.first is None else signals.status
    by_memory = out_of_memory_kills is not None and (count_out_of_memory_kills() or 0) > out_of_memory_kills
    # Other ranks crash because they lost the stopped rank.
    stopped = STOPPED_STATUSES if stop_status else (INTERRUPTED,)
    ends = [StageEnd(0)]
    for worker in workers:
        status, record, name = worker.status(), worker.record, f"rank {worker.rank}{place}"
        failure = record if status else {}
        message = failure.get("message", "")
        details: dict[str, Any] = {"time": failure.get("time", 0.0), "traceback": failure.get("traceback", "")}
        if failure.get("status") == USER_ERROR:
            ends.append(StageEnd(USER_ERROR, message, order=END_ORDER["user"], **details))
        elif status in stopped:
            ends.append(StageEnd(signals.status, order=END_ORDER["stopped"]))
        elif failure.get("status") == RESTART:
            ends.append(StageEnd(stop_status or RESTART, message, order=END_ORDER["restart"]))
        elif status == UNFINISHED:
            message = (
                f"{name} exited before the stage was finished: a function of your own (such as ppo.reward_function) "
                "must not call exit()"
            )
            ends.append(StageEnd(CRASHED, message, order=END_ORDER["exited"]))
        elif status is not None and status < 0:
            message = f"{name} was killed by {_signal_name(-status, by_memory=by_memory)}"
            ends.append(StageEnd(CRASHED, message, order=END_ORDER["lost"]))
        elif message:
            ends.append(StageEnd(CRASHED, f"{name}: {message}", order=END_ORDER["crashed"], **details))
        elif status:
            ends.append(StageEnd(CRASHED, f"{name} ended with status {status}", order=END_ORDER["failed"]))
    return replace(merge_ends(ends), stop_status=stop_status)


def count_out_of_memory_kills() -> int | None:
    """Return how many processes of this machine the kernel has killed to free memory; None if it does not count."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


def _signal_name(number: int, *, by_memory: bool) -> str:
    name = signal.Signals(number).name
    memory = "by the kernel, because the host or its container is out of memory: stage=plan shows which settings fit"
    hints = {
        "SIGKILL": f" ({memory if by_memory else 'by a user, a job scheduler or the limit of a container'})",
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
    deadline = time.monotonic() + KILL_TIMEOUT
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(0.02)
