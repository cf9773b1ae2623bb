"""The tasks of both sides: model shape and token data, the same at each call. This file does not import torch.

Lengths have a long tail, as conversations have: log-normal, clipped to a range. Tokens are random.
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
FIRST_TOKEN = 10  # smaller ids are special tokens
SHORTEST, LONGEST = 20, 512
THREADS = 2
LR = 1e-6


def log_normal_lengths(count: int, *, shortest: int, longest: int, median: float, seed: int) -> list[int]:
    """Return log-normal lengths, clipped to shortest..longest."""
    sampled = np.random.default_rng(seed).lognormal(np.log(median), 0.8, count)
    lengths: list[int] = np.clip(sampled, shortest, longest).astype(int).tolist()
    return lengths


def sequences(lengths: Sequence[int], *, seed: int) -> list[list[int]]:
    """Return random tokens without special tokens."""
    source = np.random.default_rng(seed)
    return [source.integers(FIRST_TOKEN, OPT_125M["vocab_size"], length).tolist() for length in lengths]


def conversations(count: int) -> list[list[int]]:
    """Return conversations for SFT: 20 to 512 tokens, half of them shorter than 130."""
    lengths = log_normal_lengths(count, shortest=SHORTEST, longest=LONGEST, median=130.0, seed=1)
    return sequences(lengths, seed=2)


def preferences(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Return (prompt, chosen, rejected) for DPO. A prompt with either answer has 20 to 512 tokens."""
    lengths = [log_normal_lengths(count, shortest=10, longest=256, median=65.0, seed=seed) for seed in (3, 4, 5)]
    prompts, chosen, rejected = (sequences(column, seed=6 + index) for index, column in enumerate(lengths))
    return list(zip(prompts, chosen, rejected, strict=True))


def pairs(count: int) -> list[tuple[list[int], list[int]]]:
    """Return (chosen, rejected) for the reward model: both sides of `preferences`, each with its prompt."""
    return [(prompt + chosen, prompt + rejected) for prompt, chosen, rejected in preferences(count)]


def prompts(count: int, length: int) -> list[list[int]]:
    """Return prompts for PPO."""
    return sequences([length] * count, seed=9)


def make(precision: str, **fields: Any) -> dict[str, Any]:
    """Return a task: the fields of every child process, and `fields`."""
    return {"shape": dict(OPT_125M), "precision": precision, "threads": THREADS, "lr": LR, **fields}


def of_pairs(precision: str, count: int, steps: int, warmup: int, **fields: Any) -> dict[str, Any]:
    """Return the task of the reward model or of DPO, with `count` pairs per step."""
    return make(
        precision,
        pairs_a_step=count,
        micro_rows=4,
        steps=steps,
        warmup=warmup,
        budget=2048,
        max_length=LONGEST,
        **fields,
    )
