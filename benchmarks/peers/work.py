"""The work that both sides are given: model shape and token data, the same at each call. Nothing here needs torch.

Lengths are long-tailed, as conversations are: log-normal, cut to a range. Letters: none of the tokens means anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

OPT_125M: Mapping[str, Any] = {
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "word_embed_proj_dim": 768,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
FIRST_TOKEN = 10  # those below are special
SHORTEST, LONGEST = 20, 512
THREADS = 2
LR = 1e-6


def tails(count: int, *, shortest: int, longest: int, median: float, seed: int) -> list[int]:
    """Log-normal lengths, cut to shortest..longest."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 0.8, count)
    lengths: list[int] = np.clip(drawn, shortest, longest).astype(int).tolist()
    return lengths


def sequences(lengths: Sequence[int], *, seed: int) -> list[list[int]]:
    """Random tokens, none of them special."""
    source = np.random.default_rng(seed)
    return [source.integers(FIRST_TOKEN, OPT_125M["vocab_size"], length).tolist() for length in lengths]


def conversations(count: int) -> list[list[int]]:
    """For SFT: 20 to 512 tokens, half of them under 130."""
    return sequences(tails(count, shortest=SHORTEST, longest=LONGEST, median=130.0, seed=1), seed=2)


def preferences(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    """For DPO: a prompt and two answers to it, 20 to 512 tokens with either."""
    parts = [tails(count, shortest=10, longest=256, median=65.0, seed=seed) for seed in (3, 4, 5)]
    prompts, chosen, rejected = (sequences(lengths, seed=6 + place) for place, lengths in enumerate(parts))
    return list(zip(prompts, chosen, rejected, strict=True))


def pairs(count: int) -> list[tuple[list[int], list[int]]]:
    """For the reward model: the two sides of the preferences, each with its prompt."""
    return [(prompt + chosen, prompt + rejected) for prompt, chosen, rejected in preferences(count)]


def prompts(count: int, length: int) -> list[list[int]]:
    """For PPO."""
    return sequences([length] * count, seed=9)


def base(precision: str, **rest: Any) -> dict[str, Any]:
    """What every child is told."""
    return {"shape": dict(OPT_125M), "precision": precision, "threads": THREADS, "lr": LR, **rest}
