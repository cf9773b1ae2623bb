"""SFT, reward model, DPO and PPO against TRL, DeepSpeed and plain PyTorch: the same data, shape and precision.

    sft, reward, dpo    conversations, or pairs with sides, of 20 to 512 tokens, against TRL
    ppo                 an iteration with 8 prompts of 128 tokens and 128 new tokens each, against TRL 0.19.1
    ppo_zero3           an iteration on 2 ranks under ZeRO-3, against DeepSpeed with transformers' `generate`
    logprob_memory      memory of log-probabilities, forward and backward, against logits in fp32
    ratio               spread of a rollout's first ratios around 1, against plain PPO on a bf16 model

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
