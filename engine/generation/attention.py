"""Attention over the key-value cache, reached by name through transformers' attention interface.

Models that declare `_supports_attention_backend` look up their attention function by the name in their configuration.
They pass it every keyword argument of their forward. So a forward with `step=StepTokens(...)` under the name registered
here writes its keys and values into the cache and attends over the cache, in the model's own code. No mask function
belongs to the name, so transformers makes no mask: the lengths of the sequences and the window of the layer decide
which tokens a query attends to.

Shapes: N tokens of a step, H query heads, Hkv key heads, D and Dv head sizes of keys and values.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.generation.kv_cache import KVCache, LayerCache
from engine.generation.model_support import UnsupportedModel, max_positions
from engine.generation.scheduler import Chunk
from engine.host_memory import upload
from engine.internals import attention_name
from engine.kernels import decode_attention
from engine.kernels.decode_attention import Prompts
from engine.kernels.varlen import varlen_fits, within_sequences
from engine.kernels_cpu import attention as in_c
from engine.kernels_cpu.attention import Families, ragged_attention

__all__ = ["UnsupportedModel", "attend", "attention_name", "check_arguments", "max_positions"]  # as `engine.attention`

NAME = "zerochat_slots"
UNSUPPORTED_ARGUMENTS = ("position_bias", "s_aux", "head_mask", "alibi")
MASKED_QUERIES = 256  # queries that share one mask, which keeps masks and unfused scores small


class DecodeRows(NamedTuple):
    """The rows that run one token each; int64 tensors (B,).

    slots: answer slots. tokens and positions: the inputs of the forward. counts: the number of sampled tokens of each
    sequence. offsets: the index of each new token in its slot. lengths: tokens of each sequence with the new one (0:
    attend to nothing). prompt_slots and prompt_lengths: the prompt slot of each sequence, and the number of its tokens
    in this slot. firsts: the first of the neighbouring rows with the same prompt, which is read once for all of them.
    """

    slots: Tensor
    tokens: Tensor
    positions: Tensor
    counts: Tensor
    offsets: Tensor
    lengths: Tensor
    prompt_slots: Tensor
    prompt_lengths: Tensor
    firsts: Tensor


@dataclass
class StepTokens:
    """The tokens of one forward: chunks of prompts, then one token of each decode row.

    A row may read a prompt whose last chunk is in the same forward.
    """

    cache: KVCache
    rows: DecodeRows
    chunks: Sequence[Chunk] = ()

    @cached_property
    def row_addresses(self) -> tuple[int, ...]:
        """The addresses of the rows' tensors, for the kernel in C."""
        rows = self.rows
        return in_c.addresses(rows.slots, rows.lengths, rows.prompt_slots, rows.prompt_lengths, rows.firsts)

    @cached_property
    def chunk_positions(self) -> tuple[Tensor, Tensor]:
        """The prompt slot and the position of each token of the chunks, (tokens,) each."""
        return self._upload([range(chunk.start, chunk.end) for chunk in self.chunks])

    @cached_property
    def key_positions(self) -> tuple[Tensor, Tensor]:
        """The prompt slot and the position of each cached token up to the end of each chunk, (keys,) each."""
        return self._upload([range(chunk.end) for chunk in self.chunks])

    def _upload(self, positions: Sequence[range]) -> tuple[Tensor, Tensor]:
        slots = [chunk.slot for chunk, own in zip(self.chunks, positions, strict=True) for _ in own]
        both = upload([slots, [*chain(*positions)]], self.cache.device)
        return both[0], both[1]

    @cached_property
    def chunk_bounds(self) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The first query and the first key of each chunk, (chunks + 1,) int32 each, and the most queries and keys."""
        counts = [[len(chunk.tokens) for chunk in self.chunks], [chunk.end for chunk in self.chunks]]
        starts = upload([[0, *accumulate(each)] for each in counts], self.cache.device, torch.int32)
        return (starts[0], starts[1]), (max(counts[0]), max(counts[1]))

    def rows_of_chunks(self, key_heads: int) -> Families:
        """Return where the tokens of the chunks are in `LayerCache.prompt_rows`. The kernel for CPUs needs this."""
        slot_rows, begin, spans = key_heads * self.cache.size.prompt_capacity, 0, []
        for chunk in self.chunks:
            spans.append((chunk.slot * slot_rows, chunk.start, len(chunk.tokens), begin))
            begin += len(chunk.tokens)
        return Families.continuing(spans)


class LayerAttention:
    """The attention of one layer over its cache. The settings of a layer are the same in every forward."""

    def __init__(self, layer: LayerCache, dtype: torch.dtype, scale: float, window: int | None, softcap: float | None):
        self.layer, self.scale, self.window, self.softcap = layer, scale, window, softcap
        self._in_c: in_c.SlotAttention | None = None
        if layer.answer_keys.device.type == "cpu" and in_c.supports(dtype):
            self._in_c = in_c.SlotAttention(*layer, scale=scale, window=window, softcap=softcap)

    def rows(self, query: Tensor, key: Tensor, value: Tensor, step: StepTokens) -> Tensor:
        """Write the new token of each decode row and attend; return (1, B, H, Dv).

        query: (1, H, B, D). key: (1, Hkv, B, D). value: (1, Hkv, B, Dv).
        """
        if self._in_c is not None:
            return self._in_c(query, key, value, step.row_addresses)
        rows, layer = step.rows, self.layer
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        layer.answer_keys[rows.slots, :, rows.offsets] = k
        layer.answer_values[rows.slots, :, rows.offsets] = v
        prompts = Prompts(layer.prompt_keys, layer.prompt_values, rows.prompt_slots, rows.prompt_lengths, rows.firsts)
        cached = layer.answer_keys, layer.answer_values, prompts
        return decode_attention(q, *cached, rows.slots, rows.lengths, self.scale, self.window, self.softcap)[None]

    def chunks(self, query: Tensor, key: Tensor, value: Tensor, step: StepTokens) -> Tensor:
        """Write the n tokens of all chunks and attend over the cache; return (n, H, Dv).

        query: (n, H, D). key: (n, Hkv, D). value: (n, Hkv, Dv). If a kernel supports the layer, it computes all chunks
        in one call. The CPU kernel gives a token the same numbers wherever a prompt is divided into chunks.
        """
        layer, scale, window = self.layer, self.scale, self.window
        slots, positions = step.chunk_positions
        layer.prompt_keys[slots, :, positions] = key
        layer.prompt_values[slots, :, positions] = value
        if self.softcap is None and query.device.type == "cpu":
            families = step.rows_of_chunks(key.shape[1])
            out = ragged_attention(query.transpose(0, 1), *layer.prompt_rows, families, scale=scale, window=window)
            if out is not None:
                return out
        if query.is_cuda and self.softcap is None and varlen_fits(query, value):
            if any(chunk.start for chunk in step.chunks):
                slots, positions = step.key_positions
                key, value = (cached[slots, :, positions] for cached in (layer.prompt_keys, layer.prompt_values))
            return within_sequences(query, key, value, *step.chunk_bounds, scale=scale, window=window)
        return torch.cat([*self._by_operators(query, step.chunks)])

    def _by_operators(self, query: Tensor, chunks: Sequence[Chunk]) -> Iterator[Tensor]:
        """Yield the outputs of up to MASKED_QUERIES tokens of a chunk, (tokens, H, Dv), by PyTorch's operators."""
        cached, window, begin = (self.layer.prompt_keys, self.layer.prompt_values), self.window, 0
        for chunk in chunks:
            for start in range(chunk.start, chunk.end, MASKED_QUERIES):
                end = min(start + MASKED_QUERIES, chunk.end)
                first = 0 if window is None else max(0, start + 1 - window)
                keys, values = (states[chunk.slot, None, :, first:end] for states in cached)
                queries = query[None, begin : begin + end - start].transpose(1, 2)
                out = attend(queries, keys, values, scaling=self.scale, window=window, softcap=self.softcap)
                yield out[0].transpose(0, 1)
                begin += end - start


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    step: StepTokens | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Write keys and values of the step's N tokens, and attend over the cache.

    query (1, H, N, D), key (1, Hkv, N, D), value (1, Hkv, N, Dv). Returns (1, N, H, Dv). Raises UnsupportedModel if the
    layer needs something that this function does not compute. The first call of a layer checks the layer's settings.
    """
    if step is None or attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} attends with a mask of its own")
    index: int = module.layer_idx  # type: ignore[assignment]
    attention: LayerAttention | None = step.cache.attention.get(index)
    if attention is None:
        check_arguments(module, others)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = step.cache.layer(index, key, value)
        attention = LayerAttention(layer, query.dtype, scale, sliding_window, softcap)
        step.cache.attention[index] = attention
    if not step.chunks:
        return attention.rows(query, key, value, step), None
    count = query.shape[2] - len(step.rows.slots)
    q, k, v = (tensor[0, :, :count].transpose(0, 1) for tensor in (query, key, value))
    of_chunks = attention.chunks(q, k, v, step)
    query, key, value = (tensor[:, :, count:] for tensor in (query, key, value))
    return torch.cat([of_chunks, attention.rows(query, key, value, step)[0]])[None], None


def check_arguments(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel if further arguments of a layer change its attention."""
    unsupported = [name for name in UNSUPPORTED_ARGUMENTS if others.get(name) is not None]
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        unsupported.append("attention that is not causal")
    if unsupported:
        raise UnsupportedModel(f"{type(module).__name__} needs {', '.join(unsupported)}")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the causal attention of the last L of T tokens, (B, H, L, Dv).

    query: (B, H, L, D). key: (B, Hkv, T, D). value: (B, Hkv, T, Dv). window: the most tokens that a query attends to,
    itself included. With a soft cap there is no dropout.
    """
    length, tokens, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    mask, window = None, tokens if window is None else window
    if length < tokens or window < tokens or softcap is not None:
        positions = torch.arange(tokens, device=query.device)
        distances = positions[tokens - length :, None] - positions
        mask = (distances >= 0) & (distances < window)
    if mask is None or softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
        )
    # PyTorch's fused functions do not bound scores to +-softcap (Gemma 2, 2024). As in those, scores are fp32.
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh((scale / softcap * query.float()) @ key.float().transpose(-1, -2)) * softcap
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype) @ value


class AttentionByName:
    """Makes a module attend by the registered function inside `applied`, and hides its padding token.

    Without a mask some models search their tokens for padding. The search would make the host wait for the GPU. The
    context writes the dictionaries of the configurations, because transformers validates each assignment to an
    attribute for longer than an operator of a small model takes.
    """

    def __init__(self, module: nn.Module) -> None:
        configs = {id(config): vars(config) for m in module.modules() if (config := getattr(m, "config", None))}
        by_name = {"_attn_implementation_internal": NAME}
        # The search reads the configuration of the module itself. Gemma 4 needs the token of its text configuration.
        inside = {id(module.config): by_name | {"pad_token_id": None}}
        self._inside = [
            (attributes, {key: value for key, value in inside.get(config, by_name).items() if key in attributes})
            for config, attributes in configs.items()
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = [{key: attributes[key] for key in inside} for attributes, inside in self._inside]
        for attributes, inside in self._inside:
            attributes.update(inside)
        try:
            yield
        finally:
            for (attributes, _inside), values in zip(self._inside, before, strict=True):
                attributes.update(values)


AttentionInterface.register(NAME, slot_attention)
