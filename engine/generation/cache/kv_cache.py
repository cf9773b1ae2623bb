"""A key-value cache that is allocated once and written in place.

transformers' own growing cache concatenates at each token, which copies everything kept so far; its static cache
attends over the whole capacity. This one writes into a buffer of full capacity and hands out the part in use.
Layers with a sliding window keep everything too: the mask, which transformers makes, hides what lies outside.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

SERVED = {"full_attention", "sliding_attention", "chunked_attention"}
ALL = slice(None)


class BufferedLayer(DynamicLayer):
    """Keys and values of one layer, (B, heads, capacity, head size) each, seen through a window of rows and columns.

    The window begins at `column`; `length` columns of it are in use. What is appended goes behind them, and attention
    sees the window alone.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        super().__init__()
        self.batch, self.capacity = batch, capacity
        self.rows, self.column, self.length = ALL, 0, 0
        self._key_buffer = self._value_buffer = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_buffer = self._allocate(key_states)
        self._value_buffer = self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, states: Tensor) -> Tensor:
        """Zeros: padding is hidden by a weight of zero, which would not hide a NaN left in memory."""
        _, heads, _, size = states.shape  # heads and sizes of keys and values may differ
        return states.new_zeros(self.batch, heads, self.capacity, size)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (b, heads, new, head size) and return all in use: (b, heads, length, head size), views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.column + self.length, self.length + key_states.shape[-2]
        end = self.column + self.length
        self._key_buffer[self.rows, :, start:end] = key_states
        self._value_buffer[self.rows, :, start:end] = value_states
        self.keys = self._key_buffer[self.rows, :, self.column : end]
        self.values = self._value_buffer[self.rows, :, self.column : end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows of the batch, in this order; there may be fewer than before."""
        if self.is_initialized:
            self._key_buffer = self._select(self._key_buffer, beam_idx)
            self._value_buffer = self._select(self._value_buffer, beam_idx)

    def _select(self, buffer: Tensor, rows: Tensor) -> Tensor:
        end = self.column + self.length
        kept = buffer.new_empty(len(rows), *buffer.shape[1:])
        kept[:, :, :end] = buffer[:, :, :end].index_select(0, rows)
        return kept


class BufferedCache(Cache):
    """One `BufferedLayer` a layer, all with the same window."""

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.buffered = [BufferedLayer(batch, capacity) for _ in range(layers)]
        super().__init__(layers=list(self.buffered))

    def window(self, rows: slice, column: int, length: int = 0) -> None:
        """Look at these rows from this column on, of which `length` columns are filled."""
        for layer in self.buffered:
            layer.rows, layer.column, layer.length = rows, column, length


def allocate(config: PreTrainedConfig, batch: int, capacity: int) -> Cache:
    """An empty cache for `batch` rows of `capacity` tokens.

    Models that have layers with a state instead of keys and values get transformers' own cache.
    """
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds <= SERVED and not getattr(text, "num_kv_shared_layers", 0):
        return BufferedCache(text.num_hidden_layers, batch, capacity)
    return DynamicCache(config=config)
