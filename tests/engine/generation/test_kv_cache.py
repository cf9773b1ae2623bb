"""The size of the key-value cache for a call, and the rows of its slots."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.generation.kv_cache import CacheDemand, CacheSize, KVCache

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
    assert not demand.fits(replace(small, prompt_slots=64), small.sequences)
    assert demand.size_within(5).sequences == 1, "the smallest size is one sequence"


class Operators(TorchDispatchMode):
    """Counts the operators that it sees."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("copies", [[(0, 1, 3)], [(0, 1, 3), (1, 2, 2), (3, 0, 3), (0, 4, 1)]], ids=len)
def test_all_prefixes_are_copied_by_a_few_operators(copies: list[tuple[int, int, int]]) -> None:
    """For each prompt, the host would launch two kernels a layer. Sources are read before a target is written."""
    cache = KVCache(CacheSize(5, 8, 1, 1), CPU)
    states = cache.layer(0, torch.zeros(1, 2, 1, 5), torch.zeros(1, 2, 1, 6))[:2]
    before = [each.normal_().clone() for each in states]
    with Operators() as seen:
        cache.copy_prefixes(copies)
    for new, old in zip(states, before, strict=True):
        expected = old.clone()
        for source, target, tokens in copies:
            expected[target, :, :tokens] = old[source, :, :tokens]
        assert torch.equal(new, expected)
    assert seen.count <= 15 + len(copies)  # one range for each copy, on the host
