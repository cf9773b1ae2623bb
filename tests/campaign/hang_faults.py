"""Ranks that hang: each rank stopped in each phase, other collectives, and functions of the user that never return."""

import os
import re
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.campaign.scenes import HANG_SECONDS, SECONDS, Fault, NotPossible, Scene

PHASES = {"ppo": ("generate", "score", "train", "evaluate", "save"), "reward": ("train", "save"), "sft": ("train",)}
FUNCTION = """
import os
import re
import signal
import threading
import time

calls = 0

def f(answer, row):
    global calls
    calls += 1
    if calls == 10 and os.path.exists("broken") and os.environ["RANK"] in RANKS:
        FAULT
    return len(answer) % 7 / 7
"""
LOOPS = {
    "an endless loop": "while True: pass",
    "an endless regular expression": "re.match('(a|aa)+$', 'a' * 200 + 'b')",
    "a lock that is never released": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a pipe without a writer": "open('pipe').read()",
    "a long sleep": "time.sleep(86400)",
}
OTHER_COLLECTIVE = "import torch; torch.distributed.all_reduce(torch.zeros(3))"
BARRIER = "import torch; torch.distributed.barrier()"
STOPS_ITSELF = "os.kill(os.getpid(), signal.SIGSTOP)"
GRPO = ("ppo=rloo", "ppo.samples=2", "ppo.reward_model=false", "ppo.reward_function=f.py:f")


def stop(rank: int, phase: str, scene: Scene) -> None:
    """SIGSTOP a rank inside a phase."""
    scene.start()
    scene.stop_in(rank, phase)
    scene.end()


def freeze(rank: int, scene: Scene) -> None:
    """Freeze a rank during the steps: it runs no instruction, but it is not stopped by a signal."""
    group = Path(f"/sys/fs/cgroup/freezer/zerochat-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as problem:
        raise NotPossible(f"no cgroup can be made: {problem}") from None
    try:
        scene.start()
        scene.reach(1)  # before the first step and after the last one, the limit is half an hour
        process = scene.ranks()[rank]
        (group / "cgroup.procs").write_text(str(process))
        (group / "freezer.state").write_text("FROZEN")
        until = time.monotonic() + SECONDS
        while not has_signal(process, signal.SIGKILL) and time.monotonic() < until:
            time.sleep(0.1)
        (group / "freezer.state").write_text("THAWED")  # a frozen process does not end
        scene.end()
    finally:
        (group / "freezer.state").write_text("THAWED")
        scene.worker and scene.worker.poll()
        while (group / "cgroup.procs").read_text():
            time.sleep(0.05)
        group.rmdir()


def has_signal(process: int, number: int) -> bool:
    """Return whether a signal waits for a process that cannot receive it now."""
    (waiting,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return bool(int(waiting, 16) >> (number - 1) & 1)


def call(scene: Scene) -> None:
    """Let the user's function reach its fault."""
    os.mkfifo(scene.folder / "pipe")
    (scene.folder / "broken").touch()
    scene.start()
    scene.end()
    (scene.folder / "broken").unlink()


def function(fault: str, ranks: str) -> str:
    return FUNCTION.replace("FAULT", fault).replace("RANKS", repr(ranks))


def pause(seconds: float, whom: str, scene: Scene) -> None:
    """Stop processes for some seconds, and continue them."""
    scene.start()
    scene.reach_any()
    assert scene.worker is not None
    processes = {"all": [scene.worker.pid, *scene.ranks()], "launcher": [scene.worker.pid]}.get(whom, scene.ranks())
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        time.sleep(seconds if number == signal.SIGSTOP else 0)
    scene.end()


def cases() -> list[Fault]:
    """Return the cases."""
    place = "rank {} .host [^;]*; phase {}, step .*is stopped by a signal"
    found = [
        Fault(
            "hang",
            f"{stage}: rank {rank} stopped in {phase}",
            partial(stop, rank, phase),
            place.format(rank, phase),
            (5,),
            stage,
            2,
        )
        for stage, phases in PHASES.items()
        for phase in phases
        for rank in (0, 1)
    ]
    named = r"rank {} .host .*does not reach the collective of the other ranks; it runs f \(.*f.py"
    found += [
        Fault(
            "hang",
            f"{name} on rank {rank}",
            call,
            named.format(rank),
            (5,),
            ranks=2,
            keys=GRPO,
            function=function(code, rank),
        )
        for name, code in LOOPS.items()
        for rank in ("0", "1")
    ]
    loop = function("while True: pass", "01")
    found += [
        Fault(
            "hang",
            "an endless loop on all ranks",
            call,
            r"rank 0 .*rank 1 .*it runs f \(",
            (5,),
            ranks=2,
            keys=GRPO,
            function=loop,
        ),
        Fault(
            "hang",
            "an endless loop on one rank",
            call,
            r"rank 0 .*it runs f \(",
            (5,),
            keys=GRPO,
            function=function("while True: pass", "0"),
        ),
        Fault(
            "hang",
            "an endless loop in a thread",
            call,
            r"rank 0 .host",
            (5,),
            keys=GRPO,
            own_keys=("ppo.reward_threads=4",),
            function=function("while True: pass", "0"),
        ),
        Fault(
            "hang",
            "another collective on rank 1",
            call,
            "different collectives|rank 1 |rank 0 ",
            (5, 1),
            ranks=2,
            keys=GRPO,
            function=function(OTHER_COLLECTIVE, "1"),
        ),
        Fault(
            "hang",
            "another collective on rank 0",
            call,
            "different collectives|rank 1 |rank 0 ",
            (5, 1),
            ranks=2,
            keys=GRPO,
            function=function(OTHER_COLLECTIVE, "0"),
        ),
        Fault(
            "hang",
            "a barrier on rank 1",
            call,
            "rank 1 |rank 0 ",
            (5, 1),
            ranks=2,
            keys=GRPO,
            function=function(BARRIER, "1"),
        ),
        Fault(
            "hang",
            "a function stops its process",
            call,
            r"rank 1 .*is stopped by a signal",
            (5,),
            ranks=2,
            keys=GRPO,
            function=function(STOPS_ITSELF, "1"),
        ),
        Fault("hang", "rank 1 frozen", partial(freeze, 1), "rank 1 .host", (5,), ranks=2),
        Fault("hang", "the only rank frozen", partial(freeze, 0), "rank 0 .host", (5,)),
        Fault(
            "hang",
            "rank 1 stopped, one restart",
            partial(stop, 1, "train"),
            "restart 1 of 1",
            (0,),
            ranks=2,
            own_keys=("restarts=1",),
        ),
        Fault(
            "hang",
            "rank 0 stopped, one restart",
            partial(stop, 0, "generate"),
            "restart 1 of 1",
            (0,),
            ranks=2,
            own_keys=("restarts=1",),
        ),
        Fault("hang", "ranks stopped for a short time", partial(pause, HANG_SECONDS / 3, "ranks"), "", (0,), ranks=2),
    ]
    return found
