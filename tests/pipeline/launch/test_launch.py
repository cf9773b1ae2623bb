"""The launcher starts, watches and ends its ranks, for every end of a rank or of a launcher."""

import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from pipeline.errors import Stopped, UserError, exit_status, handle_signals, raise_stopped
from pipeline.launch import command, control, processes, ranks
from pipeline.launch.control import Control, LeaderLost
from pipeline.launch.failure import (
    CRASHED,
    END_ORDER,
    HUNG,
    STOPPED,
    StageEnd,
    save_traceback,
)
from pipeline.launch.processes import launch_stage
from pipeline.launch.ranks import (
    Ranks,
    allocator_settings,
    check_rank_count,
    external_ranks,
    first_host,
    own_ranks,
    thread_settings,
    waiting_settings,
)
from tests.composed import config_of
from tests.forked_launch import FAKE_STAGES, FORKING, fork_ranks, launch
from tests.ranks import Worker

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Create a run folder whose three stages are `fake_stage.py`, and fork the ranks of this process."""
    monkeypatch.setattr(processes, "MODULES", FAKE_STAGES)
    monkeypatch.setattr(processes, "subprocess", FORKING)
    stage_dir = tmp_path / "run" / "sft"
    stage_dir.mkdir(parents=True)
    config = config_of("model=gpt2", "tracking=none")
    (stage_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return tmp_path / "run"


@pytest.fixture
def ends(launcher, fake):
    """Return a function that runs a stage of two ranks with a behaviour of `fake_stage.py`, and returns its end."""

    def run(behaviour: str) -> StageEnd:
        return launcher.call(launch_fake, fake, environment={"FAKE_STAGE": behaviour})[0]

    return run


def launch_fake(run_dir: Path, world: int = 2) -> StageEnd:
    processes.MODULES.update(FAKE_STAGES)
    return launch_stage("sft", run_dir, own_ranks(world, gpus=0))


def test_ranks_get_their_environment(fake, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert launch_fake(fake).status == 0
    env = [json.loads((fake / "sft" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"], e["MASTER_ADDR"]) for e in env] == [
        ("0", "0", "2", "127.0.0.1"), ("1", "1", "2", "127.0.0.1"),
    ]  # fmt: skip
    assert env[0]["MASTER_PORT"] == env[1]["MASTER_PORT"]
    assert len({env[0]["GROUP"], env[1]["GROUP"], os.getpgrp()}) == 3
    assert env[0]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert env[0]["TORCH_CPP_LOG_LEVEL"] == "ERROR"  # a lost store prints no C++ stacks
    assert "PYTORCH_ALLOC_CONF" not in env[0]


def test_a_file_in_the_current_folder_replaces_no_module_of_a_rank(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests.py").write_text("raise SystemExit('the file of the user')")
    monkeypatch.setattr(processes, "subprocess", subprocess)
    assert launch_fake(fake, world=1).status == 0


def test_text_that_the_locale_lacks_stops_no_rank_and_no_command(fake, monkeypatch, capfd):
    monkeypatch.setattr(processes, "subprocess", subprocess)
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    monkeypatch.setenv("FAKE_STAGE", "prints")
    assert launch_fake(fake, world=1).status == 0
    assert capfd.readouterr().out == "\\u7b54\n"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert exit_status(lambda: print("\u7b54") or 0) == 0
    assert sys.stdout.buffer.getvalue() == b"\\u7b54\n"


@pytest.mark.parametrize(
    ("busy", "own", "expected"),
    [
        (20.0, {}, {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "10000"}),  # 0.4 of 2 cores
        (30.0, {}, {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}),
        (90.0, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "4"}),
        (90.0, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}),  # one thread waits for nobody
    ],
)
def test_threads_sleep_while_they_wait_on_a_busy_machine(busy, own, expected, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: busy)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    assert thread_settings(2, own) == expected
    assert waiting_settings(own) == {name: value for name, value in expected.items() if name != "OMP_NUM_THREADS"}


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("is_visible", [True, False], ids=["a service of systemd", "a container"])
def test_ranks_start_fewer_threads_under_a_quota_of_cpu_time(version, is_visible, tmp_path, monkeypatch):
    """A container sees its own group as the root. A service of systemd may have its quota in a parent of its group."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    assert ranks.usable_cores(tmp_path) == 64
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "0::/service/job" if version == 2 else "4:cpu,cpuacct:/service/job"
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/x\n5:cpuset:/y\n{line}\n")
    root = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "cpu")
    groups = {root / "service/job": None, root / "service": 3.6} if is_visible else {root: 3.6}
    for group, quota in groups.items():
        group.mkdir(parents=True, exist_ok=True)
        used = None if quota is None else int(quota * 100_000)
        if version == 2:
            (group / "cpu.max").write_text(f"{'max' if used is None else used} 100000\n")
        else:
            (group / "cpu.cfs_quota_us").write_text(f"{-1 if used is None else used}\n")
            (group / "cpu.cfs_period_us").write_text("100000\n")
    assert ranks.usable_cores(tmp_path) == 4
    monkeypatch.setattr(ranks, "_cpu_quotas", lambda system: iter([0.3]))
    assert ranks.usable_cores(tmp_path) == 1


def test_ranks_on_gpus_use_segments_that_grow_unless_the_user_sets_the_allocator(fake, monkeypatch):
    monkeypatch.setattr(processes, "may_have_gpus", lambda: True)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    assert launch_fake(fake, world=1).status == 0
    env = json.loads((fake / "sft" / "rank-0.json").read_text())
    assert (env["PYTORCH_ALLOC_CONF"], env["NCCL_GRAPH_REGISTER"]) == ("expandable_segments:True", "1")
    assert allocator_settings({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}
    assert allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}) == {}
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
    assert allocator_settings(own) == {"NCCL_GRAPH_REGISTER": "0"}
    monkeypatch.setattr(ranks, "WSL_GPU", fake)  # a path that exists
    assert allocator_settings({}) == {} and allocator_settings(own) == {"NCCL_GRAPH_REGISTER": "0"}


@pytest.mark.parametrize(
    ("behaviour", "status", "message"),
    [
        ("user", 2, "data.path=x.jsonl: line 3 is not JSON$"),
        ("echo", 2, "data.path=x.jsonl: line 3 is not JSON$"),  # the cause, and not the crash of the other rank
        ("unread:0", 143, ""),  # as after SIGHUP: a stage saves its step
        ("crash:1", 1, "rank 1: RuntimeError: a bug$"),
        ("kill:0", 1, "rank 0 was killed by SIGKILL"),
        ("loader:0", 1, "rank 0 ended with status 127$"),  # of glibc, without memory for a thread's data
        ("long:1", 1, "rank 1: RuntimeError: \U0001f600{3900}"),
        ("exit", 1, "rank 0 exited before the stage was finished: .* must not call exit"),
        ("exit:1", 1, "rank 1 exited before the stage was finished"),
        ("lost", 1, "rank 1 exited before the stage was finished"),
    ],
)
def test_the_rank_that_failed_is_named_and_the_others_end(fake, ends, behaviour, status, message):
    began = time.monotonic()
    end = ends(behaviour)
    assert time.monotonic() - began < 30  # the other ranks sleep for a minute
    assert end.status == status and re.match(message, end.message)
    assert ('raise RuntimeError("a bug")' in end.traceback) == (behaviour == "crash:1")
    assert not any(_alive(fake, rank) for rank in (0, 1))


def test_a_kill_by_the_kernel_is_named(fake, monkeypatch):
    counts = iter([4, 5])
    monkeypatch.setattr(processes, "count_out_of_memory_kills", lambda: next(counts))
    monkeypatch.setenv("FAKE_STAGE", "kill:0")
    message = launch_fake(fake, world=1).message
    assert message.startswith("rank 0 was killed by SIGKILL (by the kernel, because the host or its container is")


def test_a_crash_prints_how_to_resume(tmp_path):
    killed = StageEnd(1, "rank 0 was killed")
    (tmp_path / "checkpoints" / "step-3.tmp").mkdir(parents=True)
    assert save_traceback(killed, tmp_path) == "; run the same command again to restart the stage"
    (tmp_path / "checkpoints" / "step-2").mkdir()
    assert save_traceback(killed, tmp_path) == "; run the same command again to resume from the newest checkpoint"
    assert "error.txt has the traceback; run the same command" in save_traceback(
        StageEnd(1, "a bug", "Traceback ..."), tmp_path
    )
    assert save_traceback(StageEnd(2, "a mistake"), tmp_path) == ""


def launch_and_exit(run_dir: Path, patience: float, grace: float, ignored: Sequence[int], errors: Path | None) -> None:
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    processes.PATIENCE, processes.GRACE_AFTER_FAILURE = patience, grace
    fork_ranks()
    sys.exit(launch_fake(run_dir).status)


def _launcher(
    run_dir: Path,
    behaviour: str,
    *,
    patience: float = 1.0,
    grace: float = 1.0,
    ignored: Sequence[int] = (),
    errors: Path | None = None,
) -> Worker:
    """Return a launcher process when both ranks have started."""
    for number in (0, 1):
        (run_dir / "sft" / f"rank-{number}.json").unlink(missing_ok=True)  # files of an earlier launcher
    settings = patience, grace, ignored, errors
    launcher = Worker(launch_and_exit, run_dir, *settings, environment={"FAKE_STAGE": behaviour})
    deadline = time.monotonic() + 30
    while not all(_has_started(run_dir, rank) for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return launcher


def _status(launcher: Worker) -> int | None:
    launcher.communicate(timeout=10)
    return launcher.returncode


def _pid(run_dir: Path, rank: int) -> int:
    return json.loads((run_dir / "sft" / f"rank-{rank}.json").read_text())["PID"]


def _has_started(run_dir: Path, rank: int) -> bool:
    try:
        return bool(_pid(run_dir, rank))
    except (OSError, ValueError):
        return False


def _alive(run_dir: Path, rank: int) -> bool:
    try:
        state = Path(f"/proc/{_pid(run_dir, rank)}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, ValueError):
        return False
    return state != "Z"


def _gone_within(run_dir: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_alive(run_dir, rank) for rank in (0, 1)):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_signals_reach_the_ranks(fake, number, status):
    launcher = _launcher(fake, "hang")
    launcher.send_signal(number)
    assert _status(launcher) == status
    assert _gone_within(fake, 0.5)


def test_ctrl_c_stops_the_ranks_after_their_step_if_it_also_ends_the_reader_of_the_output(fake):
    """As in `python train.py 2>&1 | tee log`."""
    os.mkfifo(fake / "pipe")
    reader = os.open(fake / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    launcher = _launcher(fake, "hang", errors=fake / "pipe")
    os.close(reader)
    launcher.send_signal(signal.SIGINT)
    assert _status(launcher) == 130
    assert _gone_within(fake, 0.5)


def test_a_stop_signal_to_one_rank_stops_all(fake):
    launcher = _launcher(fake, "hang")
    os.kill(_pid(fake, 1), signal.SIGTERM)
    assert _status(launcher) == 143
    assert _gone_within(fake, 0.5)


def test_nohup_is_respected(fake):
    launcher = _launcher(fake, "slow", ignored=[signal.SIGHUP])
    launcher.send_signal(signal.SIGHUP)
    assert _status(launcher) == 0


def test_ranks_that_ignore_signals_are_killed(fake):
    launcher = _launcher(fake, "deaf")
    launcher.send_signal(signal.SIGINT)
    assert _status(launcher) == 130
    assert _gone_within(fake, 0.5)
    launcher = _launcher(fake, "deaf", patience=60.0, grace=0.1)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)  # a repeated signal changes nothing
    time.sleep(0.6)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert _status(launcher) == 143
    assert _gone_within(fake, 0.5)


def test_ranks_die_with_a_killed_launcher(fake):
    launcher = _launcher(fake, "deaf")
    launcher.send_signal(signal.SIGKILL)
    assert _status(launcher) == -signal.SIGKILL
    assert _gone_within(fake, 3)


class MemoryStore(dict[str, str]):
    """The part of a TCPStore that launchers use."""

    set = dict.__setitem__
    get = dict.__getitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.fixture
def launchers(monkeypatch):
    """The first and the second launcher of a job, and a function that lets both exchange their states."""
    store = MemoryStore()
    monkeypatch.setattr(Control, "_connect", lambda _: store)
    monkeypatch.setattr(control._Exchange, "start", lambda _: None)
    monkeypatch.setattr(control, "REPORT_TIMEOUT", 0.0)
    first, second = (Control(Ranks(2, rank, 1, 0, 1, "h", 7, "torchrun")) for rank in (0, 1))

    def exchange():
        for launcher in (first, second, first):
            launcher._exchange._exchange()

    return first, second, exchange


def test_a_launcher_ends_a_start_that_the_first_launcher_has_left(launchers):
    first, second, exchange = launchers
    first.begin({"stage": "sft", "number": 0, "hang_seconds": None})
    exchange()
    second.receive()
    exchange()
    assert second.others([]) == ""
    first.begin({"stage": "sft", "number": 1, "hang_seconds": None})
    exchange()
    assert second.others([]) == "failed" and second.receive()["number"] == 1


def test_a_launcher_that_is_stopped_before_the_start_stops_the_stage(launchers):
    first, second, exchange = launchers
    second.report_stop()
    first.begin({"stage": "sft", "number": 0, "hang_seconds": None})
    exchange()
    assert first.others([]) == "failed"  # ends the ranks, which would wait for those of the second launcher
    end = first.settle(StageEnd(CRASHED, order=END_ORDER["consequence"]))
    assert end.status == STOPPED and "rank 1" in end.message


def test_invalid_variables_of_torchrun_and_slurm_are_refused():
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    changes = {"abc": torchrun | {"LOCAL_RANK": "abc"}, "-x": slurm | {"SLURM_GPUS_ON_NODE": "-x"}}
    changes |= {"MASTER_ADDR": {"RANK": "1", "WORLD_SIZE": "2"}, "node list '['": slurm | {"SLURM_NODELIST": "["}}
    for text, env in changes.items():
        with pytest.raises(UserError, match=f"cannot read the variables of torchrun or Slurm .*{re.escape(text)}"):
            external_ranks(env)
        assert ranks.prints_mistakes(env)
    empty = external_ranks({**slurm, "SLURM_GPUS_ON_NODE": ""})
    assert empty.world == 2 and external_ranks({**slurm, "SLURM_PROCID": ""}) is None


def test_a_launcher_that_never_connects_ends_the_stage(launchers, monkeypatch):
    """Its process ended before, for example because a package is missing on its machine."""
    first, second, _ = launchers
    first.begin({"stage": "sft", "number": 0, "hang_seconds": None})
    first._exchange._exchange()
    assert first.others([]) == ""
    for launcher in (first, second):
        launcher._began -= control.CONNECT_TIMEOUT + 1
    assert first.others([]) == "failed" and not first.is_complete
    end = first.settle(StageEnd(CRASHED, order=END_ORDER["consequence"]))
    assert end.status == HUNG and "the launcher of rank 1 has not connected to h for 600 s" in end.message
    with pytest.raises(LeaderLost, match="the launcher of rank 0 has not connected"):
        second.receive()


@pytest.mark.parametrize("is_external", [False, True])
def test_every_machine_of_a_plan_sees_its_configuration(is_external, tmp_path, monkeypatch):
    """The temporary folder belongs to one machine, and the current folder is on a disk that the machines share."""
    monkeypatch.chdir(tmp_path)
    folders = []
    monkeypatch.setattr(command, "_start", lambda stage, run_dir, *_, **__: folders.append(run_dir) or StageEnd(0))
    started = Ranks(2, 0, 1, 0, 1, "h", 7, "torchrun") if is_external else own_ranks(2, gpus=0)
    command._plan(config_of("model=gpt2", "stage=plan"), started, SimpleNamespace())
    assert (folders[0].parent == tmp_path) == is_external
    assert not folders[0].exists()


def test_a_run_folder_that_a_machine_does_not_share_is_named(tmp_path):
    rank = [sys.executable, "-m", "step1_sft", "--worker", str(tmp_path)]
    done = subprocess.run(rank, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"has no config.yaml on the machine {socket.gethostname()}" in done.stderr
    assert "set run_dir= to such a folder" in done.stderr and "Traceback" not in done.stderr


# Ranks and their environment


def test_the_rank_of_torchrun_is_used():
    address = {"MASTER_ADDR": "h", "MASTER_PORT": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rank = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    actual = external_ranks({**address, **rank, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert actual == Ranks(4, 3, 1, 1, 2, "h", 7, "torchrun", True, "1")
    assert not actual.leads


def test_the_rank_of_slurm_is_used():
    env = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    env |= {"SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"}
    actual = external_ranks({**env, "SLURM_JOB_ID": "4321"})
    assert actual == Ranks(8, 5, 1, 1, 4, "gpu07", ranks.SLURM_PORT + 321, "Slurm", attempt="4321-2-1")


def test_jobs_of_slurm_at_the_same_port_do_not_meet():
    """The first launcher of the second job ends, because its port is in use. The other one reaches the first job."""
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(ranks.free_port())
    jobs = ({**env, "SLURM_PROCID": str(rank), "SLURM_JOB_ID": job} for rank, job in enumerate(("4321", "5321")))
    first, stray = (Control(external_ranks(job)) for job in jobs)
    first.begin({"stage": "sft", "number": 0, "hang_seconds": None})
    for launcher in (first, stray, first):
        launcher._exchange.flush(10.0)
        launcher._exchange._changes += 1  # the next exchange reads what the others have written
        launcher._exchange.flush(10.0)
    assert first._states() == stray._states() == {}
    for launcher in (stray, first):
        launcher.close()


def test_a_batch_script_and_a_single_task_of_slurm_start_their_own_ranks():
    """`srun --gpus=8 --pty bash` starts a shell as the only task, and a command in it uses all GPUs."""
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    shell = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_GPUS_ON_NODE": "8"}
    assert external_ranks(script) is external_ranks(shell) is external_ranks({}) is None


def test_fewer_tasks_of_slurm_than_gpus_are_refused():
    env = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    started = external_ranks({**env, "SLURM_GPUS_ON_NODE": "8"})
    with pytest.raises(UserError, match=r"1 task on a machine with 8 GPUs.*--ntasks-per-node=8.*ranks=2"):
        check_rank_count(started, None)
    check_rank_count(started, 2)
    check_rank_count(external_ranks({**env, "SLURM_GPUS_ON_NODE": "1"}), None)
    check_rank_count(external_ranks(env), None)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1,n2", "n1"), ("gpu[07-09,12],cpu1", "gpu07"), ("a-b[1,3].x", "a-b1.x"), ("rack3-[002]", "rack3-002")],
)
def test_the_first_host_of_slurms_list(hosts, first):
    assert first_host(hosts) == first


def test_one_process_for_each_gpu():
    assert own_ranks(None, gpus=0).world == 1
    assert own_ranks(None, gpus=4).world == 4
    assert own_ranks(2, gpus=4).world == 2
    with pytest.raises(UserError, match="ranks=3, but this machine has 2 GPUs: set ranks=2 or less"):
        own_ranks(3, gpus=2)


@pytest.mark.parametrize(("usable", "count"), [(True, 8), (False, 0)])
def test_gpus_with_a_driver_that_is_too_old_do_not_count(usable, count, tmp_path, monkeypatch):
    """`device_count` asks the driver's library and does not start CUDA."""
    (tmp_path / "torch.py").write_text(
        f"class cuda:\n    is_available = lambda: {usable}\n    device_count = lambda: 8\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ranks, "may_have_gpus", lambda: True)
    assert ranks.count_gpus() == count


def test_ranks_on_cpus_of_a_machine_with_gpus_print_one_warning(fake, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(processes, "subprocess", subprocess)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert launch_fake(fake, world=1).status == 0
    assert capfd.readouterr().err == ""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    assert launch_fake(fake).status == 0
    assert capfd.readouterr().err.count("warning: sft runs on CPUs, because this PyTorch cannot use a GPU") == 1


def test_ranks_belong_to_whoever_started_them():
    environment = external_ranks({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"})
    with pytest.raises(UserError, match="torchrun started 2"):
        check_rank_count(environment, 4)
    check_rank_count(environment, 2)


# Complete commands


ARGUMENTS = ["model=gpt2", "data=demo", "tracking=none", "name=x"]


NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def _rank_of(kind: str, rank: int, port: int, cwd: Path, *more: str, **env: str) -> Worker:
    """Start the command of one of two ranks."""
    environment = dict(zip(NAMES[kind], (str(rank), "2", str(rank)), strict=True))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Worker(launch, cwd, [*ARGUMENTS, *more], FAKE_STAGES, environment={**environment, **address, **env})


def test_ranks_started_by_slurm_run_all_stages(tmp_path):
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer" / "config.json").write_text("{}")
    port = ranks.free_port()
    started = [_rank_of("Slurm", rank, port, tmp_path, "reward=scorer", FAKE_STAGE_TORCH="1") for rank in (1, 0)]
    output = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], output
    stages = json.loads((tmp_path / "runs" / "x" / "manifest.json").read_text())["stages"]
    assert {stage: record["status"] for stage, record in stages.items()} == {"sft": "finished", "ppo": "finished"}
    assert output[0] == ""
    assert "python chat.py runs/x" in output[1]
    assert (tmp_path / "runs" / "x" / "ppo" / "rank-1.json").exists()


def test_a_stop_does_not_wait_for_a_missing_launcher(tmp_path):
    """The rank of the first launcher waits for the others in PyTorch, which calls no handler of a signal."""
    process = _rank_of("torchrun", 0, ranks.free_port(), tmp_path, FAKE_STAGE_TORCH="1")
    while not (tmp_path / "runs" / "x" / "sft" / "config.yaml").exists():
        time.sleep(0.05)
    time.sleep(3)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - began < 10
    assert process.returncode == 143
    assert output.endswith("sft: stopped; run the same command again to resume\n")


def test_a_failing_rank_ends_all_launchers(tmp_path):
    port = ranks.free_port()
    began = time.monotonic()
    started = [_rank_of("torchrun", rank, port, tmp_path, FAKE_STAGE="crash:1") for rank in (0, 1)]
    output = [process.communicate(timeout=100)[0] for process in started]
    assert time.monotonic() - began < 30
    assert [process.returncode for process in started] == [1, 1], output
    (line,) = [line for line in (output[0] + output[1]).splitlines() if "error" in line]
    assert (
        line.startswith(f"error: sft: rank 1 (host {socket.gethostname()}): RuntimeError: a bug") and line in output[0]
    )


def test_only_rank_zero_prints_a_mistake_before_any_work(tmp_path):
    port = ranks.free_port()
    started = [_rank_of("torchrun", rank, port, tmp_path, "data.path=none.jsonl") for rank in (0, 1)]
    output = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert output[1] == ""
    assert output[0].startswith("error: data.path=none.jsonl: there is no such file")


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"RANK": "1"}, True),  # of another program
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"}, False),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, True),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, False),
    ],
)
def test_only_launchers_of_a_job_leave_a_mistake_to_the_first_one(environment, shown, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert command.main(["model=nope"]) == 2
    assert ("error: model=nope" in capsys.readouterr().err) == shown


def test_a_port_in_use_is_one_message(tmp_path, monkeypatch, capsys):
    """For example by processes of an earlier job."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
        for name, value in {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        assert command.main(["model=gpt2", "tracking=none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: rank 0: the launchers cannot connect at 127.0.0.1:{port} (")
    assert line.endswith("and MASTER_PORT to a free port")


@pytest.fixture
def unconnected():
    """The second launcher of a job at a port that accepts connections, but never answers."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        yield Ranks(2, 1, 1, 0, 1, "127.0.0.1", mute.getsockname()[1], "torchrun")


def test_a_stop_signal_ends_the_wait_for_the_first_launcher(unconnected):
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM])
    with handle_signals(raise_stopped), pytest.raises(Stopped):
        timer.start()
        Control(unconnected)


@pytest.mark.parametrize("host", ["127.0.0.1", "first-machine.invalid"])
def test_a_wait_for_the_first_launcher_is_reported_and_limited(host, unconnected, monkeypatch, capsys):
    monkeypatch.setattr(control, "CONNECT_NOTICE", 0.0)
    monkeypatch.setattr(control, "CONNECT_TIMEOUT", 0.5)
    with pytest.raises(LeaderLost, match=f"the launchers cannot connect at {host}:.*set MASTER_ADDR"):
        Control(replace(unconnected, address=host))
    place = f"{host}:{unconnected.port}"
    assert capsys.readouterr().err == f"rank 1 waits up to 0 minutes for a connection to {place}\n"


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (OSError(errno.EINVAL, "Invalid argument"), 1),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),
        (UserError("a mistake"), 2),
    ],
)
def test_all_launchers_end_with_the_same_status(problem, status, monkeypatch):
    def fail(*_):
        raise problem

    sent = []
    monkeypatch.setattr(command, "Control", lambda ranks: SimpleNamespace(finish=sent.append))
    monkeypatch.setattr(command, "check_paths", fail)
    monkeypatch.setattr("pipeline.errors.discard_output", lambda: None)
    try:
        ended = command.main(["model=gpt2", "tracking=none"])
    except OSError:
        ended = 1  # Python's status after a traceback
    assert (ended, sent) == (status, [status])
