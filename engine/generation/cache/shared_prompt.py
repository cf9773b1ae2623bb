"""Attention of samples of one prompt, which read the prompt once for all of them.

The queries of all samples against the prompt are one product; what each has said itself is read by itself. The two
parts of a softmax join by the logarithms of their masses (Juravsky et al., 2024, "Hydragen: high-throughput LLM
inference with shared prefixes", equation 4). For CPUs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.generation.cache.groups import Family, Group
from engine.generation.cache.slots import SlotLayer

Tail = tuple[Group, int, int, Tensor | None]


def joined_attention(
    queries: Tensor, layer: SlotLayer, family: Family, tails: Sequence[Tail], scaling: float | None
) -> Tensor:
    """queries (n, heads, size) of a family's n sequences -> (n, heads, size).

    `tails` are its groups with the positions behind the prompt that each reads and a mask, True on what is seen.
    """
    n, heads, size = queries.shape
    key_heads = layer.keys.shape[1]
    shared = heads // key_heads
    queries = queries.reshape(n, key_heads, shared, size)
    together = queries.transpose(0, 1).reshape(1, key_heads, n * shared, size)
    key, value = (t[family.slot, None, :, : family.prompt] for t in (layer.keys, layer.values))
    prompt, prompt_mass = (
        t.view(key_heads, n, shared, -1).transpose(0, 1) for t in _with_mass(together, key, value, None, scaling)
    )
    apart = []
    for group, first, last, mask in tails:
        slots = slice(group.slot, group.slot + len(group.lengths))
        key, value = layer.keys[slots, :, first:last], layer.values[slots, :, first:last]
        mine = queries[group.begin - family.begin : group.end - family.begin]
        apart.append(_with_mass(mine, key, value, mask, scaling))
    tail, tail_mass = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*apart, strict=True))
    joined = torch.lerp(tail, prompt, (prompt_mass - tail_mass).sigmoid())
    return joined.reshape(n, heads, size).to(queries.dtype)


def _with_mass(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """query (b, heads, L, size), key and value (b, heads, T, size) -> attention (b, heads, L, size) fp32, and the
    logarithm of what its softmax was divided by (b, heads, L, 1).

    PyTorch's own attention computes that logarithm and keeps it for the backward pass; the operator below, which is not
    public, hands it out.
    """
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, mass = operator(query, key, value, 0.0, False, attn_mask=mask, scale=scaling)
    return out.float(), mass.unsqueeze(-1)
