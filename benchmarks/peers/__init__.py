"""SFT, reward model, DPO and PPO beside the peers: the same data, shape and precision, in processes of their own.

A case is a module of this folder with a function `run(rounds) -> list[Result]`. The sides of a case run in turn; each
is a process of its own, and a peer's runs in an environment of its own (environments.py).
"""

import importlib
from collections.abc import Iterator, Sequence

from benchmarks.record import Result

CASES = ("sft", "reward", "dpo", "ppo", "ppo_zero3", "logprob_memory", "ratio")


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Measure `cases`, one after the other."""
    for case in cases:
        yield from importlib.import_module(f"benchmarks.peers.{case}").run(rounds)
