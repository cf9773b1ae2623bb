"""New tokens put into a slot cache: one key and one value a sequence and head, where each sequence has come to.

This is the torch implementation, for every device, and the reference for the faster one beside it.
"""

from torch import Tensor


def write_tokens(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
    """keys[slots[b], :, positions[b]] = key[b], and likewise values.

    key, value: (B, heads, D); keys, values: (slots, heads, capacity, D), whose head sizes may differ; slots, positions:
    (B,) int64, the places different from one another, or what is written there without meaning.
    """
    keys[slots, :, positions] = key
    values[slots, :, positions] = value
