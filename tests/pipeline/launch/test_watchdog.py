"""A stage that hangs ends with its own exit status and one line that names the rank. `restarts` starts it again."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.launch import control, failure, processes, ranks, watchdog
from pipeline.launch.failure import CRASHED, END_ORDER, HUNG, StageEnd, merge_ends
from pipeline.launch.watchdog import LongSteps, RankState, RankWatch, frames, is_hung, report, stacks
from tests import hosts
from tests.forked_launch import FAKE_STAGES, launch
from tests.ranks import Worker

ROOT = Path(__file__).resolve().parents[3]
FRAMES = """\
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/rewards.py", line 9 in score
  File "/zerochat/step3_ppo/train.py", line 27 in train"""
WAITING = '  File "/x/lib/python3.11/site-packages/torch/distributed/c10d.py", line 8 in wait\n' + FRAMES


IDLE = """
import os, sys, time
from pipeline.launch.worker import STACK, write_stack_on_request
from pipeline.progress import Row
def wait_for_ever():
    time.sleep(600)
os.environ[STACK] = sys.argv[2]
write_stack_on_request()
Row(int(sys.argv[1])).write(1, 0.0, 0, 0, False, phase="train", collective="")
wait_for_ever()
"""

BUSY = """
import os, sys, threading, time
from pipeline.launch.worker import STACK, write_stack_on_request
def descend(depth):
    return depth and descend(depth - 1)
def work():
    while True:
        descend(200)
os.environ[STACK] = sys.argv[1]
write_stack_on_request()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
work()
"""


def state(rank: int, **changes: object) -> RankState:
    """Return the state of a rank that waits in its twelfth collective."""
    moment = {"moves": 9, "limit": 60.0, "step": 3, "number": 12, "inside": True, "phase": "generate"}
    waits = RankState(**moment, collective="gather_objects", rank=rank, host="one", process=100 + rank, idle=70.0)
    return replace(waits, **changes)


@pytest.mark.parametrize(
    ("idle", "stopped", "limit", "hang_seconds", "hung"),
    [
        ((70, 70), (), 60.0, None, True),
        ((70, 62), (), 60.0, None, False),  # the limit of 60 s and 3 s for the stacks
        ((5, 700), (), 60.0, None, False),
        ((5, 5), (1,), 60.0, None, False),
        ((6, 6), (1,), 60.0, 2.0, True),
        ((6, 6), (), 60.0, 2.0, False),
        ((100, 100), (), 1800.0, None, False),  # the largest limit holds
        ((100, 100), (1,), 1800.0, None, True),  # except while a process is stopped
    ],
)
def test_a_stage_hangs_if_no_rank_makes_progress(idle, stopped, limit, hang_seconds, hung):
    states = [state(rank, idle=float(s), is_stopped=rank in stopped) for rank, s in enumerate(idle)]
    states[0] = replace(states[0], limit=limit)
    assert is_hung(states, hang_seconds) == hung
    assert not is_hung([], hang_seconds)


def test_a_line_appears_for_each_half_minute_of_a_step_and_names_the_phase(capsys):
    """Step 1 has three phases of 20 s. Steps of 20 s have no line, because the stage prints one at their end.

    Between phase "evaluate" and step 1, the rank has no phase.
    """
    now = [0.0]
    display = LongSteps("ppo", lambda: now[0])
    for second in range(200):
        now[0] = float(second)
        step, phase = (
            (0, "evaluate" if second < 50 else "")
            if second < 70
            else (1, ("generate", "score", "train")[(second - 70) // 20 % 3])
        )
        display.show(state(0, step=step if second < 130 else second // 20, phase=phase))
    assert capsys.readouterr().err.splitlines() == [
        "ppo: phase evaluate, 30 s so far",
        "ppo: 1.0 min so far",
        "ppo: phase score, step 1, 30 s so far",
    ]


def test_a_stopped_rank_is_named():
    line = report([state(0), state(1, is_stopped=True, phase="train", inside=False), state(2)])
    assert "rank 1 (host one, process 101; phase train, step 3; after collective 12, gather_objects) is stopped" in line
    assert "no rank has made progress for 70 s" in line and "rank 0" not in line and "rank 2" not in line


def test_a_rank_outside_of_the_collective_is_named_with_its_call():
    line = report([state(0), state(1, inside=False, stack=FRAMES)])
    assert "rank 1 (host one" in line and "rank 0" not in line
    assert line.endswith("it runs score (/home/me/rewards.py, line 9)")


def test_a_rank_that_waits_for_an_asynchronous_collective_waits():
    line = report([state(0, inside=False, stack=WAITING), state(1, inside=False, stack=FRAMES)])
    assert "rank 1 (host one" in line and "rank 0" not in line


def test_ranks_in_different_collectives_are_all_named():
    line = report([state(0), state(1, number=13, collective="all_reduce[4]")])
    assert "different collectives: rank 0" in line
    assert "in collective 12, gather_objects" in line and "in collective 13, all_reduce[4]" in line


def test_if_all_ranks_wait_in_one_collective_the_connection_is_named():
    line = report([state(0), state(1, host="two")])
    assert "a connection between hosts is cut: rank 0" in line and "NCCL's records in nccl-rank-N" in line
    assert "on GPUs, set NCCL_P2P_DISABLE=1: rank 0" in report([state(0), state(1)])


def test_the_frames_of_a_dump_are_shown():
    assert frames(f"Stack (most recent call first):\n{FRAMES}\n") == FRAMES
    assert frames("") == ""
    text = stacks([state(0, stack=FRAMES), state(1)])
    assert FRAMES in text and "no stack: the process does not run Python code" in text


def test_the_lost_rank_is_the_cause_of_several_ends():
    crash = StageEnd(CRASHED, "connection closed", order=END_ORDER["crashed"], time=1.0)
    later = replace(crash, message="also closed", time=2.0)
    lost = StageEnd(CRASHED, "rank 3 was killed", order=END_ORDER["lost"])
    consequence = StageEnd(CRASHED, order=END_ORDER["consequence"], stop_status=143)
    assert merge_ends([consequence, later, crash]).message == "connection closed"
    assert merge_ends([StageEnd(0), crash, consequence, lost]) == replace(lost, stop_status=143)


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        (
            OSError(errno.EMFILE, "Too many open files", "/x"),
            "too many open files ([Errno 24] Too many open files: '/x')",
        ),
        (OSError(errno.EIO, "Input/output error"), "the disk failed ([Errno 5] Input/output error): repair it"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory outside of forward and backward"),
        (MemoryError(), "out of memory outside of forward and backward"),
        (MemoryError("Unable to allocate 9 GiB for an array"), "out of memory outside of forward and backward"),
        (RuntimeError("can't start new thread"), "no thread can be started, because memory or the number of"),
        (
            type("PanicException", (BaseException,), {})('IOError(Os { message: "Resource temporarily unavailable" })'),
            "no thread can be started, because memory or the number of",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (
            RuntimeError("CUDA driver error: operation not supported\nException raised from ExpandableSegment"),
            "the driver of the GPU refuses PyTorch's expandable segments (CUDA driver error: operation not supported)",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/app']"),
            "there is no temporary folder ([Errno 2] No usable temporary directory found in ['/tmp', '/app']): set",
        ),
        (
            RuntimeError(
                "NCCL error: unhandled system error\nLast error:\nError while creating shared memory segment "
                "/dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)"
            ),
            "NCCL has too little shared memory (Error while creating shared memory segment /dev/shm/nccl-WU88OE (size",
        ),
    ],
)
def test_limits_of_the_machine_have_advice(problem, advice):
    assert failure.advise(problem).startswith(advice)
    assert failure.advise(OSError(errno.EINVAL, "Invalid argument")) is None


def test_a_blocked_disk_does_not_delay_the_message(tmp_path, monkeypatch):
    monkeypatch.setattr(failure, "DISK_TIMEOUT", 0.05)
    end = StageEnd(HUNG, "rank 0 hangs", "its stack")
    os.mkfifo(tmp_path / "error.txt")  # opening a FIFO blocks until there is a reader
    assert f"the disk of {tmp_path} has not answered for 0 s: run the same" in failure.save_traceback(end, tmp_path)
    with open(tmp_path / "error.txt") as reader:  # the open of the other end returns
        assert reader.read() == "its stack"
    (tmp_path / "error.txt").unlink()
    monkeypatch.setattr(failure, "DISK_TIMEOUT", 60.0)
    assert "has the Python stacks; run the same command" in failure.save_traceback(end, tmp_path)


def test_a_rank_with_busy_threads_survives_the_request_for_its_stack(tmp_path):
    with open(tmp_path / "stack", "w+") as stack:
        command = [sys.executable, "-c", BUSY, str(stack.fileno())]
        process = subprocess.Popen(command, pass_fds=(stack.fileno(),), cwd=ROOT, stdout=subprocess.PIPE)
        try:
            assert process.stdout.readline() == b"ready\n"
            for _ in range(1000):
                process.send_signal(signal.SIGUSR2)
                time.sleep(0.001)
            assert process.poll() is None
            assert "in work" in Path(stack.name).read_text()
        finally:
            process.kill()
            process.communicate()


def test_an_idle_rank_writes_its_stack_and_nccls_collectives(tmp_path, monkeypatch):
    """The rank is a process with the signal handlers of a worker and with a pipe like NCCL's."""
    monkeypatch.setattr(watchdog.tempfile, "gettempdir", lambda: str(tmp_path))
    watch = RankWatch(3)
    environment = watch.flight_recorder(tmp_path / "run")
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/run/nccl-rank-"
    pipe = f"{environment['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}3.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    row, stack = watch.descriptors
    process = subprocess.Popen([sys.executable, "-c", IDLE, str(row), str(stack)], pass_fds=(row, stack), cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (actual := watch.look(process.pid)).stack:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "in wait_for_ever" in actual.stack and actual.idle > actual.limit == 0.0
        time.sleep(0.3)
        assert watch.look(process.pid).idle >= actual.idle + 0.3, "the seconds of all looks add up"
        assert os.read(reader, 10) == b"1"
    finally:
        process.kill()
        process.wait()
        watch.close()
        os.close(reader)
    assert not os.path.exists(pipe)


# Complete commands with fake_stage.py as their stage

ARGUMENTS = ["model=gpt2", "data=demo", "tracking=none", "name=x", "stage=sft", "engine.hang_seconds=2"]


def launch_with_little_grace(folder: Path, arguments: list[str]) -> None:
    """Launch with SIGKILL soon after SIGTERM: a rank stopped by SIGSTOP does not end before, and has no stack."""
    processes.GRACE_AFTER_FAILURE, watchdog.STACK_TIMEOUT, watchdog.SECONDS_BETWEEN_LINES = 0.5, 2.0, 1.0
    launch(folder, arguments, FAKE_STAGES)


def start(folder: Path, *more: str, **environment: str) -> Worker:
    return Worker(launch_with_little_grace, folder, [*ARGUMENTS, *more], environment=environment)


def failures(output: str) -> list[str]:
    assert "Traceback" not in output, output
    return [line for line in output.splitlines() if line.startswith("error:")]


@pytest.mark.parametrize(
    ("behaviour", "named"),
    [
        ("stopped:1", "rank 1 (host {host}, process {pid}; phase train, step 3) is stopped by a signal (SIGSTOP)"),
        ("mixed:1", "the ranks wait in different collectives: rank 0 ("),
    ],
)
def test_a_stage_that_hangs_ends_with_status_5(tmp_path, behaviour, named):
    """tests/campaign/test_faults.py has a rank that does not reach the collective of the other ranks."""
    worker = start(tmp_path, "ranks=2", FAKE_STAGE=behaviour)
    output, _ = worker.communicate()
    assert worker.returncode == HUNG == 5, output
    (line,) = failures(output)
    stage = tmp_path / "runs" / "x" / "sft"
    pid = json.loads((stage / "rank-1.json").read_text())["PID"]
    assert named.format(host=socket.gethostname(), pid=pid) in line
    assert "error.txt has the Python stacks; run the same command again" in line
    stacks_of_ranks = (stage / "error.txt").read_text()
    assert ("no stack" in stacks_of_ranks) == (behaviour == "stopped:1") and "fake_stage.py" in stacks_of_ranks


def test_a_long_step_whose_parts_are_noted_is_no_hang(tmp_path):
    """On one rank a step has no collectives. Its micro-batches and decode steps may take hours on a laptop."""
    worker = start(tmp_path, "engine.hang_seconds=1", FAKE_STAGE="works")
    output, _ = worker.communicate()
    assert worker.returncode == 0, output
    assert "\nsft: step 3, 1" in output, "a line each second shows that the step runs"


def test_restarts_end_and_mistakes_of_the_user_are_not_repeated(tmp_path):
    worker = start(tmp_path, "restarts=1", FAKE_STAGE="crash")
    output, _ = worker.communicate()
    assert (worker.returncode, len(failures(output)), output.count("restart 1 of 1")) == (1, 2, 1), output
    worker = start(tmp_path, "restarts=3", FAKE_STAGE="user")
    output, _ = worker.communicate()
    assert (worker.returncode, len(failures(output))) == (2, 1) and "restart 1" not in output


def _given(rank: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """Return the environment that torchrun gives one of two ranks."""
    given = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**given, "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def test_launchers_of_several_machines_restart_a_lost_rank(tmp_path):
    port = ranks.free_port()
    started = [start(tmp_path, "restarts=2", FAKE_STAGE="kill:1,stopped:0", **_given(rank, port)) for rank in (0, 1)]
    first, second = (worker.communicate()[0] for worker in started)
    assert [worker.returncode for worker in started] == [0, 0], first + second
    lost, hung = failures(first)
    assert "rank 1 (host" in lost and "was killed by SIGKILL (by a user, a job scheduler or the limit" in lost
    assert "rank 0 (host" in hung and "is stopped by a signal" in hung
    assert "sft: restart 1 of 2" in first and "sft: restart 2 of 2" in first
    assert second == ""


def launch_on_host(host: hosts.Host, folder: Path, arguments: list[str]) -> None:
    host.enter()
    control.REPORT_TIMEOUT = 4.0  # for a host that cannot report
    launch(folder, arguments, FAKE_STAGES)


def test_a_disconnected_host_ends_the_job_on_all_hosts(tmp_path):
    reason = hosts.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    words = [*ARGUMENTS, "restarts=3"]
    with hosts.two_hosts(tmp_path) as both:
        running = [
            Worker(
                launch_on_host,
                host,
                tmp_path,
                words,
                environment={"FAKE_STAGE": "hang", **_given(rank, 29471, "10.77.0.1")},
            )
            for rank, host in enumerate(both)
        ]
        deadline = time.monotonic() + 120
        while not all((tmp_path / "runs" / "x" / "sft" / f"rank-{rank}.json").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline and all(process.poll() is None for process in running)
            time.sleep(0.05)
        hosts.disconnect(both[1])
        outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [HUNG, HUNG], outputs
    assert "the launcher of rank 1 (host" in failures(outputs[0])[0] and len(failures(outputs[0])) == 1
    assert "the store at 10.77.0.1 has not answered for" in failures(outputs[1])[0] and len(failures(outputs[1])) == 1
    assert failures(outputs[1])[0].endswith("; run the same command again on all machines to resume")
