"""The slot cache: keys and values of many sequences in memory of a fixed size, and what one forward sees of it.

A slot holds one sequence, its tokens in order; a layer is one tensor (slots, heads, capacity, head size). Tokens are
written where they belong in one indexed copy, whatever mixture of sequences a forward carries, and nothing is moved
afterwards: attention reads slices in place. A head's tokens lie together, so that one query streams through memory:
that was measured an eighth faster than a token's heads together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CALL_COST = 45_000  # cached numbers that attention reads in the time one more call takes (measured on CPU)


@dataclass
class SlotLayer:
    """keys, values: (slots, heads, capacity, head size); sizes of the two may differ."""

    keys: Tensor
    values: Tensor


class SlotCache:
    """Slots of equal capacity. A layer's memory is taken when its first token comes."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.layers: dict[int, SlotLayer] = {}

    def write(self, layer_index: int, rows: Tensor, keys: Tensor, values: Tensor) -> SlotLayer:
        """Put keys and values (N, heads, head size) at rows (N, heads) of a layer seen as (all, head size)."""
        if layer_index not in self.layers:
            self.layers[layer_index] = SlotLayer(self._allocate(keys), self._allocate(values))
        layer = self.layers[layer_index]
        _put(layer.keys, rows, keys)
        _put(layer.values, rows, values)
        return layer

    def _allocate(self, states: Tensor) -> Tensor:
        """Zeros: what a mask hides has a weight of zero, which would not hide a NaN left in memory."""
        _, heads, size = states.shape
        return states.new_zeros(self.slots, heads, self.capacity, size)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` tokens of slot `source`."""
        for layer in self.layers.values():
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers that have been written."""
        tensors = [tensor for layer in self.layers.values() for tensor in (layer.keys, layer.values)]
        return sum(tensor[0, :, 0].numel() * tensor.element_size() for tensor in tensors)

    @property
    def token_numbers(self) -> int:
        """Numbers of one token in one layer, keys and values; 1 before anything is written."""
        first = next(iter(self.layers.values()), None)
        return 1 if first is None else first.keys[0, :, 0].numel() + first.values[0, :, 0].numel()


@dataclass(frozen=True)
class Group:
    """Single queries, columns `begin` to `end` of a forward, of as many neighbouring slots from `slot` on.

    lengths: tokens of each sequence, the new one included.
    """

    begin: int
    end: int
    slot: int
    lengths: tuple[int, ...]

    def seen(self, window: int | None, device: torch.device) -> tuple[int, int, Tensor | None]:
        """The span of positions to read, and which of it each row sees: (n, 1, 1, span), or None for all."""
        last = max(self.lengths)
        first = 0 if window is None else max(0, min(self.lengths) - window)
        starts = [0 if window is None else max(0, length - window) for length in self.lengths]
        if min(self.lengths) == last and max(starts) == first:
            return first, last, None
        positions = torch.arange(first, last, device=device)
        mask = positions < torch.tensor(self.lengths, device=device)[:, None]
        if max(starts) > first:
            mask &= positions >= torch.tensor(starts, device=device)[:, None]
        return first, last, mask[:, None, None]


@dataclass(frozen=True)
class Chunk:
    """Columns `begin` to `end` of a forward: a run of the tokens of slot `slot`, `start` of which are cached."""

    begin: int
    end: int
    slot: int
    start: int

    @property
    def length(self) -> int:
        """Tokens of the sequence once the chunk is written."""
        return self.start + self.end - self.begin

    def seen(self, window: int | None, device: torch.device) -> tuple[int, int, Tensor | None]:
        """The span of positions to read, and what of it each query sees: (queries, span), None for all before it."""
        first = 0 if window is None else max(0, self.start + 1 - window)
        if self.end - self.begin == 1 or (self.start == 0 and (window is None or window >= self.length)):
            return first, self.length, None
        queries = torch.arange(self.start, self.length, device=device)[:, None]
        keys = torch.arange(first, self.length, device=device)
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
        return first, self.length, mask


@dataclass
class Step:
    """What one forward carries: first a token of each decoding sequence, then chunks of prompts.

    slots, positions (N,): where each of its tokens is cached.
    """

    cache: SlotCache
    slots: Tensor
    positions: Tensor
    groups: Sequence[Group]
    chunks: Sequence[Chunk]
    _rows: dict[int, Tensor] = field(default_factory=dict)
    _seen: dict[int | None, list[tuple[Group | Chunk, int, int, Tensor | None]]] = field(default_factory=dict)

    def rows(self, heads: int) -> Tensor:
        """(N, heads): where the tokens go in a layer of so many heads, seen as (slots * heads * capacity, size)."""
        if heads not in self._rows:
            head = torch.arange(heads, device=self.slots.device)
            first = (self.slots[:, None] * heads + head) * self.cache.capacity
            self._rows[heads] = first + self.positions[:, None]
        return self._rows[heads]

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows that layers asked for; None is a layer without."""
        return set(self._seen)

    def seen(self, window: int | None) -> list[tuple[Group | Chunk, int, int, Tensor | None]]:
        """Each part with the span of positions it reads and its mask, for a layer's sliding window."""
        if window not in self._seen:
            device = self.slots.device
            parts: list[Group | Chunk] = [*self.groups, *self.chunks]
            self._seen[window] = [(part, *part.seen(window, device)) for part in parts]
        return self._seen[window]


def _put(cached: Tensor, rows: Tensor, states: Tensor) -> None:
    """Write states (N, heads, size) at rows (N, heads) of a layer; indexed copies move an element at a time, so in
    elements of 16 bytes where the sizes allow it."""
    cached, piece = cached.view(-1, cached.shape[-1]), 16 // cached.element_size()
    pieces = [*states.stride()[:-1], states.storage_offset(), states.shape[-1]]
    if states.stride(-1) == 1 and not any(number % piece for number in pieces) and states.device.type == "cpu":
        cached, states = cached.view(torch.complex128), states.view(torch.complex128)
    cached.index_put_((rows,), states)


def cut_into_groups(slots: Sequence[int], lengths: Sequence[int], token_numbers: int) -> list[tuple[int, int]]:
    """Cut rows into runs (begin, end) to attend over together: neighbouring slots, not too different lengths.

    A run costs one call and reads its longest length for each row; the cheapest cut is found by dynamic programming.
    """
    call = CALL_COST / token_numbers  # in tokens
    best: list[tuple[float, int]] = [(0.0, 0)]  # (cost, begin of the last run) of the first rows
    for end in range(1, len(slots) + 1):
        longest, candidates = 0, []
        for begin in range(end - 1, -1, -1):
            if begin < end - 1 and slots[begin] + 1 != slots[begin + 1]:
                break
            longest = max(longest, lengths[begin])
            candidates.append((best[begin][0] + call + longest * (end - begin), begin))
        best.append(min(candidates))
    cuts, end = [], len(slots)
    while end > 0:
        cuts.append((best[end][1], end))
        end = best[end][1]
    return cuts[::-1]
