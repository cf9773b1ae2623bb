"""Faults of machines: memory that runs out, clocks that jump, hosts that are cut off."""

import itertools
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tests import hosts
from tests.campaign.hang_faults import pause
from tests.campaign.scenes import HANG_SECONDS, SECONDS, STEPS, Fault, Missed, NotPossible, Scene
from tests.forked_launch import launch
from tests.tiny import ROOT

PORT = "29473"
MEMORY = "[Mm]emory|bad_alloc|allocate"
DAY = 86400.0


def limited_memory(extra: int, scene: Scene) -> None:
    """Limit the address space of the ranks (RLIMIT_AS) to its present size and some bytes, at a random moment."""
    scene.start()
    scene.reach_any()
    for process in scene.ranks():
        with suppress(ProcessLookupError, FileNotFoundError):
            size = int(Path(f"/proc/{process}/statm").read_text().split()[0]) * mmap.PAGESIZE + extra
            resource.prlimit(process, resource.RLIMIT_AS, (size, size))
    scene.end()


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Make a cgroup with a limit of memory."""
    group = Path(f"/sys/fs/cgroup/memory/zerochat-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as problem:
        raise NotPossible(f"no cgroup can be made: {problem}") from None
    try:
        yield group
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.05)
        group.rmdir()


def killed_by_kernel(rank: int, scene: Scene) -> None:
    """Let the kernel kill a rank because its cgroup has no memory left."""
    with memory_group(1 << 20) as group:
        scene.start()
        scene.reach_any()
        (group / "cgroup.procs").write_text(str(scene.ranks()[rank]))
        scene.end()


def launch_with_clock(shift: float, folder: Path, arguments: Sequence[str], modules: dict[str, str]) -> None:
    """Run the command with a wall clock that jumps by `shift` seconds, and back, every few calls."""
    real, calls = time.time, itertools.count()
    time.time = lambda: real() + (shift if next(calls) % 6 > 2 else 0.0)
    launch(folder, arguments, modules)


def jumping_clock(shift: float, scene: Scene) -> None:
    """Run with a clock that jumps, kill the run at a random moment, and resume it with the same clock."""
    scene.starter = partial(launch_with_clock, shift)
    worker = scene.start()
    scene.reach_any()
    worker.send_signal(signal.SIGKILL)
    scene.end()
    scene.start()
    scene.end()


def odd_times(moment: float, scene: Scene) -> None:
    """Kill the run at a random moment, and give all files another time, as a copy or a wrong clock does."""
    worker = scene.start()
    scene.reach_any()
    worker.send_signal(signal.SIGKILL)
    scene.end()
    for file in scene.run_dir.rglob("*"):
        os.utime(file, (moment, moment), follow_symlinks=False)
    scene.start()
    scene.end()


def on_two_hosts(act: str, scene: Scene) -> None:
    """Run on two hosts with one rank each, and disturb the second or the first one."""
    if reason := hosts.unavailable_reason():
        raise NotPossible(reason)
    scene.copy()
    command = [sys.executable, str(ROOT / "train.py"), *scene.arguments(), *scene.fault.own_keys]
    environment = {
        **scene.environment,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with hosts.two_hosts(scene.folder) as both:
        given = [
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": both[0].address,
                "MASTER_PORT": PORT,
            }
            for rank in (0, 1)
        ]
        running = [host.start(command, environment | own) for host, own in zip(both, given, strict=True)]
        try:
            _wait_for_lines(scene, running, scene.rng.randint(1, STEPS - 2))
            time.sleep(scene.rng.random() * 0.4)
            host = both[0 if "first" in act else 1]
            process = running[0 if "first" in act else 1]
            if "cut off" in act:
                hosts.disconnect(host)
            if "briefly" in act:
                time.sleep(HANG_SECONDS / 4)
                subprocess.run(["ip", "-n", host.namespace, "link", "set", host.interface, "up"], check=True)
            if "killed" in act:
                process.send_signal(signal.SIGKILL)
            if "stopped" in act:
                process.send_signal(signal.SIGSTOP)
            outputs = [running[0].communicate(timeout=SECONDS)[0]]
            if "stopped" in act:
                process.send_signal(signal.SIGCONT)
            outputs.append(running[1].communicate(timeout=SECONDS)[0])
        except subprocess.TimeoutExpired as problem:
            raise AssertionError(f"does not end: {problem}") from None
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
    scene.status, scene.output = running[0].returncode, outputs[0]
    if "first" in act:
        scene.status, scene.output = running[1].returncode, outputs[1]


def _wait_for_lines(scene: Scene, running: "list[subprocess.Popen[str]]", lines: int) -> None:
    log = scene.run_dir / scene.fault.stage / "metrics.jsonl"
    until = time.monotonic() + SECONDS
    while not log.exists() or len(log.read_bytes().splitlines()) < lines:
        if all(process.poll() == 0 for process in running):
            raise Missed("the run ended before the fault")
        if any(process.poll() for process in running) or time.monotonic() > until:
            raise AssertionError("ended before the fault: " + "".join(p.communicate()[0] for p in running))
        time.sleep(0.02)


def cases() -> list[Fault]:
    """Return the cases."""
    one_answer = f"{MEMORY}|^(?!.*error:)", (0, 1, 2)  # 1: the system's loader ended the process
    found = [
        Fault("memory", f"{extra >> 10} kB of address space, {stage}, {ranks} ranks", partial(limited_memory, extra),
              *one_answer, stage, ranks)
        for extra, stage, ranks in ((0, "ppo", 1), (256 << 10, "ppo", 2), (2 << 20, "sft", 2), (1 << 20, "reward", 1))
    ]  # fmt: skip
    kernel = r"rank {} was killed by SIGKILL .by the kernel, because the host is out of memory"
    for rank, statuses, own_keys in ((0, (1,), ()), (1, (0,), ("restarts=1",))):
        name, act = f"the kernel kills rank {rank}", partial(killed_by_kernel, rank)
        found.append(Fault("memory", name, act, kernel.format(rank), statuses, ranks=2, own_keys=own_keys))
    clocks: list[tuple[str, Callable[[Scene], None]]] = [
        ("jumps by a day back", partial(jumping_clock, -DAY)),
        ("jumps by 100 years", partial(jumping_clock, 36525 * DAY)),
        ("files of 2100", partial(odd_times, 4.1e9)),
        ("files of 1970", partial(odd_times, 0.0)),
        ("all processes sleep longer than the limit", partial(pause, HANG_SECONDS + 6, "all")),
        ("the launcher sleeps longer than the limit", partial(pause, HANG_SECONDS + 6, "launcher")),
    ]
    found += [Fault("clock", name, act, "", (0,), ranks=2) for name, act in clocks]
    away = r"launcher of rank 1 .host.* has not answered|rank \d .host"
    networks: list[tuple[str, str, str, tuple[int, ...]]] = [
        ("the second host is cut off", "cut off", away, (5,)),
        ("the first host is cut off", "cut off first", "not answered|rank 1", (5,)),
        ("the second host is cut off briefly", "cut off briefly", "", (0,)),
        ("the second launcher is killed", "killed", "not answered|rank 1|rank 0", (5, 1)),
        ("the second launcher is stopped", "stopped", "not answered|rank 1", (5,)),
        ("the first launcher is killed", "first killed", "not answered|has ended", (5,)),
    ]
    found += [
        Fault("network", name, partial(on_two_hosts, act), says, statuses, ranks=2)
        for name, act, says, statuses in networks
    ]
    return found
