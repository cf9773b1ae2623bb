"""The size of the key-value cache for a call, and the rows of its slots."""

import torch

from engine.generation.kv_cache import CacheDemand

CPU = torch.device("cpu")


def test_a_shared_prompt_is_counted_once() -> None:
    """There are 8 samples for each of 100 prompts. With little memory, the cache has one prompt for four sequences, so
    that s sequences take s (128 + 1024 / 4) tokens.
    """
    demand = CacheDemand(prompt_tokens=1000, answer_tokens=120, prompts=100, sequences=800, batch_size=800)
    size = demand.size_within(1_000_000)
    assert (size.sequences, size.prompt_slots) == (800, 100)
    assert size.tokens < 206_000
    small = demand.size_within(100_000)  # 86 sequences if each had its own prompt
    assert (small.sequences, small.prompt_slots) == (260, 65)
    assert demand.size_within(99_967).sequences == 259, "the scratch slot takes memory too"
    assert demand.fits(small, small.sequences) and not demand.fits(small, 300)
    assert demand.size_within(5).sequences == 1, "the smallest size is one sequence"
