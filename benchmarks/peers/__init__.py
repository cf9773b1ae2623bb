"""SFT, reward model, DPO and PPO against TRL, DeepSpeed and plain PyTorch: the same data, shape and precision.

A case is a module in this folder. Its `run(rounds) -> list[Result]` runs the sides in turn, each in a process of its
own. `python -m` on the module runs our side. The peers are in `baselines`; each has its own environment
(environments.py).
"""

import importlib
from collections.abc import Iterator, Sequence

from benchmarks.record import Result

CASES = ("sft", "reward", "dpo", "ppo", "ppo_zero3", "logprob_memory", "ratio")


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Measure `cases` in order."""
    for case in cases:
        yield from importlib.import_module(f"benchmarks.peers.{case}").run(rounds)
