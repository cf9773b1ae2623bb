"""Reading a prompt once for several samples gives the attention over each one's own copy."""

import pytest
import torch

from engine.generation.cache.groups import Family, Group
from engine.generation.cache.shared_prompt import joined_attention
from engine.generation.cache.slots import SlotCache, SlotLayer, Step

HEADS, SIZE, PROMPT = 4, 16, 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_joined_parts_are_one_softmax(key_heads: int, scaling: float | None, dtype: torch.dtype) -> None:
    """Against the definition in float64; lengths that differ, slots with a gap."""
    torch.manual_seed(0)
    layer = SlotLayer(*(torch.randn(5, key_heads, 32, SIZE).to(dtype) for _ in "kv"))
    slots, lengths = [0, 1, 2, 4], [12, 17, 14, 31]
    for tensor in (layer.keys, layer.values):
        tensor[:, :, :PROMPT] = tensor[0, :, :PROMPT].clone()
    family = Family(PROMPT, (Group(3, 6, 0, (12, 17, 14)), Group(6, 7, 4, (31,))))
    queries = torch.randn(4, HEADS, SIZE).to(dtype)
    zero = torch.zeros(1, dtype=torch.long)
    tails = Step(SlotCache(1, 1), zero, zero, [family], []).tails(family)
    found = joined_attention(queries, layer, family, tails, scaling)
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        key, value = (t[slot, :, :length].double().repeat_interleave(HEADS // key_heads, 0)
                      for t in (layer.keys, layer.values))  # fmt: skip
        scores = (key @ queries[row].double()[..., None])[..., 0] * (SIZE**-0.5 if scaling is None else scaling)
        right = (scores.softmax(-1)[:, None] @ value)[:, 0]
        torch.testing.assert_close(found[row].double(), right, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=0.01)
