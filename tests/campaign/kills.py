"""Kills and stops of the processes of a run at random moments. The run must end bit for bit like an undisturbed one.

    python -m tests.campaign kills --count 30 --seed 1 [--ranks 8] [--jobs N]

A case is a function of the seed and its number: stage, number of ranks, victim, restarts and moment. Victims are one
rank (SIGKILL, or SIGSTOP, which the watchdog must find), the launcher, or all processes. One line must name a killed
rank.
"""

import argparse
import os
import random
import signal
from contextlib import suppress
from functools import partial

from tests.campaign.faults import run_cases
from tests.campaign.scenes import Fault, Scene
from tests.campaign.undisturbed import STAGES


def kill(victim: str, rank: int, scene: Scene) -> None:
    """Send the signal to the victim at a random moment."""
    worker = scene.start()
    scene.reach_any()
    ranks = scene.ranks()
    chosen = {"launcher": [worker.pid], "all": [worker.pid, *ranks]}.get(victim, ranks[rank : rank + 1])
    for process in chosen:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP if victim == "stop" else signal.SIGKILL)
    scene.end()


def draw(seed: int, number: int, numbers_of_ranks: list[int]) -> Fault:
    """Return the case with a number."""
    rng = random.Random(f"{seed} {number}")
    ranks, victim = rng.choice(numbers_of_ranks), rng.choice(("kill", "kill", "stop", "launcher", "all"))
    rank, restarts, stage = rng.randrange(ranks), rng.choice((0, 2)), rng.choice(STAGES)
    is_rank = victim in ("kill", "stop")
    status = (0 if restarts else {"kill": 1, "stop": 5}[victim]) if is_rank else -signal.SIGKILL
    name = f"{number}: {victim}, rank {rank} of {ranks}, {stage}, restarts={restarts}"
    says = f"error: [^\n]*rank {rank} " if is_rank else ""
    return Fault(victim, name, partial(kill, victim, rank), says, (status,), stage, ranks,
                 own_keys=(f"restarts={restarts}",))  # fmt: skip


def cases(seed: int, count: int, numbers_of_ranks: list[int]) -> list[Fault]:
    """Return the cases of a seed."""
    return [draw(seed, number, numbers_of_ranks) for number in range(count)]


def main(arguments: list[str]) -> int:
    """Run the cases, print a line for each and a table of counts, and return 1 if a case has a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign kills")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 2], help="numbers of ranks to draw from")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    options = parser.parse_args(arguments)
    return run_cases(partial(cases, options.seed, options.count, options.ranks), "", options.seed, options.jobs)
