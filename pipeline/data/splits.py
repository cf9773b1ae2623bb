"""Which prompts are held out, which stage trains on which prompt, and how much of each source is used.

All of it is a function of the prompt's text alone: a prompt has two fixed points in [0, 1), read from its SHA-256.
The first says whether it is held out, the second which stage's share it falls into. So the splits depend on no
rank, machine, order or seed, every source agrees on them, and a change of one share leaves the other as it was.
"""

import hashlib
from collections.abc import Mapping, Sequence

from pipeline.config.stages import STAGES
from pipeline.data.records import Conversation, Message, Preference, Prompt


def digest(record: Conversation | Preference | Prompt) -> bytes:
    """SHA-256 of the record's prompt: every message before the answer, roles included."""
    if isinstance(record, Conversation):
        return digest_of(record.messages[:-1])
    return digest_of(record.prompt if isinstance(record, Preference) else record.messages)


def digest_of(messages: Sequence[Message]) -> bytes:
    text = "\x1e".join(f"{message.role}\x1f{message.content}" for message in messages)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def held_out_point(prompt: bytes) -> float:
    """In [0, 1), from the digest's first 53 bits; held out is what lies below the held-out share."""
    return (int.from_bytes(prompt[:8], "big") >> 11) / 2**53


def stage_point(prompt: bytes) -> float:
    """In [0, 1), independent of `held_out_point`."""
    return (int.from_bytes(prompt[8:16], "big") >> 11) / 2**53


def stage_of(prompt: bytes, shares: Mapping[str, float]) -> str:
    """The stage that trains on this prompt. `shares` are relative; their sum need not be 1."""
    stages = [stage for stage in STAGES if shares.get(stage, 0.0) > 0]
    total = sum(shares[stage] for stage in stages)
    point, edge = stage_point(prompt) * total, 0.0
    for stage in stages[:-1]:
        edge += shares[stage]
        if point < edge:
            return stage
    return stages[-1]


def mixed_sizes(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """How many rows of each source make a mix in the ratio of `weights` without repeating a row.

    It is the largest such mix: the source that is scarcest for its weight is used whole, the others in part.
    """
    largest = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(1, min(size, round(largest * weight))) for size, weight in zip(sizes, weights, strict=True)]
