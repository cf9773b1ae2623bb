"""Attention over the slot cache, reached by name through transformers' attention interface.

Models that declare `_supports_attention_backend` look their attention function up by the name in their configuration,
and hand it every keyword that their forward was called with. So a forward with `slots=Step(...)`, under the name
registered here, writes its keys and values into the slot cache and attends over it, in the model's own code. No mask
function belongs to the name, so transformers makes no mask: each sequence's length and the layer's window say it all.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.generation.cache.groups import Chunk, Family
from engine.generation.cache.shared_prompt import joined_attention
from engine.generation.cache.slots import SeenRows, SlotLayer, Step
from engine.kernels.varlen import fits, varlen_kernel, within_sequences
from engine.kernels_cpu import decode_attention as host
from engine.kernels_cpu.ragged_attention import ragged_attention

NAME = "zerochat_slots"
CHANGES_SCORES = ("position_bias", "s_aux", "head_mask", "alibi")  # arguments that this function would have to heed


class Unserved(Exception):
    """The model asks for something that this attention doesn't do."""


class Asked(NamedTuple):
    """What a layer hands its attention: query (1, heads, N, head size), key and value (1, key heads, N, head size)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    window: int | None
    softcap: float | None


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    slots: Step | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, N, head size), key and value (1, key heads, N, head size) of the step's N tokens, or of more
    that only fill it up.

    Returns (1, N, heads, value's head size). Raises Unserved.
    """
    if slots is None or attention_mask is not None:
        raise Unserved(f"{type(module).__name__} asks for another kind of attention")
    check_served(module, others)
    slots.windows.add(sliding_window)
    layer = slots.cache.layer(module.layer_idx, key, value)  # type: ignore[arg-type]
    in_c = query.device.type == "cpu" and host.serves(query.dtype)
    asked = Asked(query, key, value, scaling, sliding_window, softcap)
    return (_in_one_call if in_c else _part_by_part)(slots, layer, asked), None


def _in_one_call(slots: Step, layer: SlotLayer, asked: Asked) -> Tensor:
    """All single queries by a kernel of ours, whatever their slots and lengths. Chunks of prompts by another: those
    that begin in one call, those that go on, over the cache, in a second. Where a prompt is cut changes no number.
    """
    query, key, value, scaling, window, softcap = asked
    _, heads, tokens, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    begun = went_on = None
    if slots.beginnings is not None and softcap is None:
        begun = ragged_attention(query[0], key[0], value[0], slots.beginnings, scale=scale, window=window)
    out = query.new_empty(1, tokens, heads, value.shape[-1]) if begun is None else begun[None]
    host.write_and_attend(
        query,
        key,
        value,
        layer.keys,
        layer.values,
        slots.slots,
        slots.lengths,
        slots.singles,
        out,
        scale,
        window,
        softcap,
        slots.families(window),
    )
    further = slots.continuations(key.shape[1])
    if further is not None and softcap is None:
        went_on = ragged_attention(query[0], *layer.in_a_row, further, scale=scale, window=window)
    for chunk in slots.chunks:
        columns = slice(chunk.begin, chunk.end)
        if chunk.start and went_on is not None:
            out[0, columns] = went_on[columns]
        elif chunk.start or begun is None:
            out[0, columns] = _of_chunk(query[0].transpose(0, 1), slots, layer, asked, chunk)
    if tokens > len(slots.slots):  # the others only fill the step up
        out[:, len(slots.slots) :] = 0
    return out


def _part_by_part(slots: Step, layer: SlotLayer, asked: Asked) -> Tensor:
    """The same by PyTorch's operators."""
    query, key, value, _, window, softcap = asked
    rows = slots.rows(key.shape[1])
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # (N, key heads, head size)
    layer.write(rows, keys[: len(rows)], values[: len(rows)])
    queries = query[0].transpose(0, 1)  # (N, heads, head size)
    by_kernel = _within_chunks(slots, layer, asked)
    if by_kernel is not None:
        return by_kernel[None]
    families = softcap is None and key.shape[-1] == value.shape[-1]
    parts = [_of_rows(queries, slots, layer, asked, seen) for seen in slots.seen(window, families=families)]
    parts += [_of_chunk(queries, slots, layer, asked, chunk) for chunk in slots.chunks]
    if len(rows) < len(queries):  # the others only fill the step up
        parts.append(parts[0].new_zeros(len(queries) - len(rows), *parts[0].shape[1:]))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined[None]


def _of_rows(queries: Tensor, slots: Step, layer: SlotLayer, asked: Asked, seen: SeenRows) -> Tensor:
    """queries (N, heads, head size) of a step; what the columns of one part of those that decode say."""
    part, first, last, mask = seen
    mine = queries[part.begin : part.end]
    if isinstance(part, Family):
        return joined_attention(mine, layer, part, slots.tails(part), asked.scaling)
    span = slice(part.slot, part.slot + len(part.lengths))
    k, v = layer.keys[span, :, first:last], layer.values[span, :, first:last]
    return attend(mine[:, :, None], k, v, mask, scaling=asked.scaling, softcap=asked.softcap)[:, :, 0]


def _of_chunk(queries: Tensor, slots: Step, layer: SlotLayer, asked: Asked, chunk: Chunk) -> Tensor:
    """What a chunk's columns say, in runs where it takes a mask, or scores that are kept: (tokens, heads, size)."""
    said = []
    for part, first, last, mask in slots.chunk_seen(chunk, asked.window, whole=asked.softcap is None):
        mine = queries[part.begin : part.end].transpose(0, 1)[None]
        k, v = layer.keys[part.slot, None, :, first:last], layer.values[part.slot, None, :, first:last]
        out = attend(mine, k, v, mask, scaling=asked.scaling, softcap=asked.softcap)
        said.append(out[0].transpose(0, 1))
    return said[0] if len(said) == 1 else torch.cat(said)


def _within_chunks(slots: Step, layer: SlotLayer, asked: Asked) -> Tensor | None:
    """(N, heads, head size): what chunks of prompts say by a GPU's kernel, those that begin in one call, each that goes
    on from cached tokens in its own; None where the step has others, or the kernel doesn't do this.
    """
    query, value = asked.query[0], asked.value[0]
    if not query.is_cuda or asked.softcap is not None or slots.groups or slots.chunks[-1].end < query.shape[1]:
        return None
    kernel = varlen_kernel() if fits(query, value) else None
    if kernel is None:
        return None
    q, k, v = (t.transpose(0, 1) for t in (query, asked.key[0], value))
    how: dict[str, Any] = {"scale": asked.scaling, "window": asked.window}
    starts, longest = slots.chunk_starts
    out = torch.empty_like(q)
    if any(chunk.start == 0 for chunk in slots.chunks):
        out = within_sequences(kernel, q, k, v, (starts, starts), (longest, longest), **how)
    for chunk in (each for each in slots.chunks if each.start):
        columns, seen = slice(chunk.begin, chunk.end), slice(chunk.first(asked.window), chunk.length)
        keys, values = (t[chunk.slot, :, seen].transpose(0, 1) for t in (layer.keys, layer.values))
        tokens = chunk.end - chunk.begin, len(keys)
        bounds = slots.bounds(tokens[0]), slots.bounds(tokens[1])
        out[columns] = within_sequences(kernel, q[columns], keys, values, bounds, tokens, **how)
    return out


def check_served(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Raise Unserved where a layer's further arguments would change what attention over the slots computes."""
    odd = [name for name in CHANGES_SCORES if others.get(name) is not None]
    if odd or others.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise Unserved(f"{type(module).__name__} asks for {', '.join(odd) or 'another kind of attention'}")


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None, softcap: float | None
) -> Tensor:
    """query (n, heads, L, size), key and value (n, key heads, T, size), mask True on what is seen, broadcasting to
    (n, heads, L, T) -> (n, heads, L, value's size). Without a mask the L queries are the last, and see all before them.
    """
    n, heads, length, size = query.shape
    groups = heads // key.shape[1]
    if groups > 1 and length == 1:  # the heads that share a key go as its queries
        query = query.reshape(n, -1, groups, size)
    elif groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    causal = mask is None and length > 1
    if softcap is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scaling)
    else:
        out = _capped(query, key, value, mask, causal, scaling, softcap)
    return out.reshape(n, heads, length, value.shape[-1])


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scaling: float | None, softcap: float
) -> Tensor:
    """Attention with scores squashed to +-softcap (Gemma 2, 2024), which the fused functions don't offer."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


@contextmanager
def routed(module: nn.Module, name: str = NAME) -> Iterator[None]:
    """Within the block the module attends by the function that is registered as `name`, and knows of no padding: some
    models look for it in their tokens when no mask is given, for which a GPU would have to be waited for.
    """
    config: Any = module.config
    before = config._attn_implementation, getattr(config, "pad_token_id", None)
    config._attn_implementation, vars(config)["pad_token_id"] = name, None  # some configurations refuse None by name
    try:
        yield
    finally:
        config._attn_implementation, vars(config)["pad_token_id"] = before


AttentionInterface.register(NAME, slot_attention)
