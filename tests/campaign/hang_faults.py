"""Ranks that hang: each rank stopped in each phase, other collectives, and functions of the user that never return."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tests.campaign.scenes import Fault, Scene
from tests.campaign.undisturbed import HANG_SECONDS

PHASES = {"ppo": ("generate", "score", "train", "evaluate", "save"), "reward": ("train", "save"), "sft": ("train",)}
FUNCTION = """
import os
import signal

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
    "a pipe without a writer": "open('pipe').read()",
}
OTHER_COLLECTIVE = "import torch; torch.distributed.all_reduce(torch.zeros(3))"
BARRIER = "import torch; torch.distributed.barrier()"
STOPS_ITSELF = "os.kill(os.getpid(), signal.SIGSTOP)"
ONCE = ("restarts=1",)
GRPO = ("ppo=rloo", "ppo.samples=2", "ppo.reward_model=false", "ppo.reward_function=f.py:f")


def stop(rank: int, phase: str, scene: Scene) -> None:
    """SIGSTOP a rank inside a phase."""
    scene.start()
    scene.stop_in(rank, phase)
    scene.end()


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


def hang(name: str, act: Callable[[Scene], None], says: str, **more: Any) -> Fault:
    """Return a case of two ranks of PPO that ends because a rank hangs."""
    return Fault("hang", name, act, says, **({"statuses": (5,), "ranks": 2} | more))


def reward(name: str, fault: str, broken: str, says: str, **more: Any) -> Fault:
    """Return a case in which the reward function reaches a fault on the ranks `broken`."""
    return hang(name, call, says, keys=GRPO, function=function(fault, broken), **more)


def cases() -> list[Fault]:
    """Return the cases."""
    stopped, loop = "is stopped by a signal", "while True: pass"
    place = f"rank {{}} .host [^;]*; phase {{}}, step .*{stopped}"
    named = r"rank {} .host .*does not reach the collective of the other ranks; it runs f \(.*f.py"
    found = [
        hang(f"{stage}: rank {n} stopped in {phase}", partial(stop, n, phase), place.format(n, phase), stage=stage)
        for stage, phases in PHASES.items()
        for phase in phases
        for n in (0, 1)
    ]
    for number, (name, code) in enumerate(LOOPS.items()):
        rank = str(number % 2)
        found.append(reward(f"{name} on rank {rank}", code, rank, named.format(rank)))
    return [
        *found,
        reward("an endless loop on all ranks", loop, "01", r"rank 0 .*rank 1 .*it runs f \("),
        reward("an endless loop on one rank", loop, "0", r"rank 0 .*it runs f \(", ranks=1),
        reward("an endless loop in a thread", loop, "0", "rank 0 .host", ranks=1, own_keys=("ppo.reward_threads=4",)),
        reward("another collective on rank 1", OTHER_COLLECTIVE, "1", "different coll|rank [01] ", statuses=(5, 1)),
        reward("a barrier on rank 0", BARRIER, "0", "rank 1 |rank 0 ", statuses=(5, 1)),
        reward("a function stops its process", STOPS_ITSELF, "1", f"rank 1 .*{stopped}"),
        hang("rank 1 stopped, one restart", partial(stop, 1, "train"), "restart 1 of 1", statuses=(0,), own_keys=ONCE),
        hang("ranks stopped for a short time", partial(pause, HANG_SECONDS / 3, "ranks"), "", statuses=(0,)),
        hang("all processes sleep", partial(pause, HANG_SECONDS + 6, "all"), "", statuses=(0,)),
        hang("the launcher sleeps", partial(pause, HANG_SECONDS + 6, "launcher"), "", statuses=(0,)),
    ]
