"""The slot cache: keys and values of many sequences in memory of a fixed size, and what one forward sees of it.

A slot holds one sequence, its tokens in order; a layer is one tensor (slots, heads, capacity, head size). Tokens are
written where they belong in one call, whatever mixture of sequences a forward carries, and nothing is moved
afterwards: attention reads them in place. A head's tokens lie together, so that one query streams through memory:
that was measured an eighth faster than a token's heads together.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from engine.generation.cache.groups import Chunk, Family, Group
from engine.kernels_cpu.ragged_attention import Families
from engine.offload.direct_io import aligned
from engine.uploads import upload

SeenRows = tuple[Group | Family, int, int, Tensor | None]
SeenChunk = tuple[Chunk, int, int, Tensor | None]
QUERIES = 256  # of a chunk that one mask is for, 8 MiB where 32,000 tokens are cached


@dataclass
class SlotLayer:
    """keys, values: (slots, heads, capacity, head size); sizes of the two may differ."""

    keys: Tensor
    values: Tensor

    def write(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values (N, heads, head size) at rows (N, heads) of the layer seen as (all, head size)."""
        _put(self.keys, rows, keys)
        _put(self.values, rows, values)

    @property
    def in_a_row(self) -> tuple[Tensor, Tensor]:
        """Keys and values as (heads, rows, head size), where slot s has its tokens from row s * heads * capacity on."""
        return _in_a_row(self.keys), _in_a_row(self.values)


class SlotCache:
    """Slots of equal capacity. A layer's memory is taken when its first token comes."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.layers: dict[int, SlotLayer] = {}

    def layer(self, index: int, keys: Tensor, values: Tensor) -> SlotLayer:
        """A layer; at its first token it is made, for keys and values like these (1, heads, N, head size)."""
        found = self.layers.get(index)
        if found is None:
            found = self.layers[index] = SlotLayer(self._allocate(keys), self._allocate(values))
        return found

    def _allocate(self, states: Tensor) -> Tensor:
        """Zeros: what a mask hides has a weight of zero, which would not hide a NaN left in memory.

        On CPUs in large pages: a step writes one token to each head of each slot, all on pages of their own.
        """
        _, heads, _, size = states.shape
        shape = (self.slots, heads, self.capacity, size)
        if states.device.type == "cpu":
            return aligned(math.prod(shape), states.dtype).view(shape)
        return states.new_zeros(shape)

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


@dataclass
class Step:
    """What one forward carries: first a token of each decoding sequence, then chunks of prompts.

    slots, positions (N,): where each of its tokens is cached.
    """

    cache: SlotCache
    slots: Tensor
    positions: Tensor
    groups: Sequence[Group | Family]
    chunks: Sequence[Chunk]
    windows: set[int | None] = field(default_factory=set)  # that layers asked for; None is a layer without
    _rows: dict[int, Tensor] = field(default_factory=dict)
    _seen: dict[tuple[int | None, bool], list[SeenRows]] = field(default_factory=dict)
    _stairs: dict[int | None, Tensor] = field(default_factory=dict)
    _bounds: dict[int, Tensor] = field(default_factory=dict)
    _families: dict[int | None, Tensor | None] = field(default_factory=dict)
    _continuations: dict[int, Families | None] = field(default_factory=dict)
    _tails: dict[int, list[tuple[Group, int, int, Tensor | None]]] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have."""
        return self.cache.capacity

    def rows(self, heads: int) -> Tensor:
        """(N, heads): where the tokens go in a layer of so many heads, seen as (slots * heads * capacity, size)."""
        if heads not in self._rows:
            head = torch.arange(heads, device=self.slots.device)
            first = (self.slots[:, None] * heads + head) * self.cache.capacity
            self._rows[heads] = first + self.positions[:, None]
        return self._rows[heads]

    @cached_property
    def lengths(self) -> Tensor:
        """(N,): the tokens of a sequence up to each of them."""
        return self.positions + 1

    @cached_property
    def singles(self) -> int:
        """How many of the tokens are the decoding sequences'."""
        return self.groups[-1].end if self.groups else 0

    def families(self, window: int | None) -> Tensor | None:
        """(singles, 2): the first row of each one's family, itself where it has none, and the prompt's tokens, 0 where
        the layer's sliding window does not reach over them; None where there are no families.
        """
        if window not in self._families:
            found = [
                part
                for part in self.groups
                if isinstance(part, Family) and (window is None or window >= max(part.lengths))
            ]
            table = torch.stack([torch.arange(self.singles), torch.zeros(self.singles, dtype=torch.long)], 1)
            for part in found:
                table[part.begin : part.end] = torch.tensor([part.begin, part.prompt])
            self._families[window] = table if found else None
        return self._families[window]

    @cached_property
    def beginnings(self) -> Families | None:
        """Where the chunks lie that begin a prompt, each by itself; None where there are none."""
        found = [[(chunk.begin, chunk.end - chunk.begin)] for chunk in self.chunks if chunk.start == 0]
        return Families.of(found) if found else None

    def continuations(self, heads: int) -> Families | None:
        """Where the other chunks lie, and their sequences in a layer of so many heads (`SlotLayer.in_a_row`)."""
        if heads not in self._continuations:
            slot = heads * self.cache.capacity
            found = [(c.slot * slot, c.start, c.end - c.begin, c.begin) for c in self.chunks if c.start]
            self._continuations[heads] = Families.going_on(found) if found else None
        return self._continuations[heads]

    @cached_property
    def chunk_starts(self) -> tuple[Tensor, int]:
        """Where each chunk begins, and the last one's end, (chunks + 1,) int32; tokens of the longest."""
        starts = [self.chunks[0].begin, *(chunk.end for chunk in self.chunks)]
        return upload(starts, self.slots.device, torch.int32), max(c.end - c.begin for c in self.chunks)

    def bounds(self, tokens: int) -> Tensor:
        """(2,) int32: where so many tokens begin and end, for a kernel that takes sequences side by side."""
        if tokens not in self._bounds:
            self._bounds[tokens] = upload([0, tokens], self.slots.device, torch.int32)
        return self._bounds[tokens]

    def chunk_seen(self, chunk: Chunk, window: int | None, *, whole: bool = True) -> Iterator[SeenChunk]:
        """A chunk with the span of positions it reads, for a layer's sliding window; where that takes a mask in runs,
        so that masks stay small. `whole` False cuts it in any case.
        """
        cut = not whole or chunk.masked(window)
        for part in chunk.cut(QUERIES) if cut else (chunk,):
            first = part.first(window)
            yield part, first, part.length, self._mask(part, part.start - first, window)

    def _mask(self, part: Chunk, before: int, window: int | None) -> Tensor | None:
        """(queries, span) True on what each sees, `before` cached tokens among it; None for a causal call's."""
        if not part.masked(window):
            return None
        stairs = self._stairs.get(window)
        if stairs is None:
            most = max(run.start - run.first(window) for chunk in self.chunks for run in chunk.cut(QUERIES))
            steps = torch.arange(QUERIES, device=self.slots.device)[:, None] + most
            places = torch.arange(most + QUERIES, device=self.slots.device)
            stairs = places <= steps
            if window is not None:
                stairs &= places > steps - window
            self._stairs[window] = stairs
        queries, most = part.end - part.begin, stairs.shape[1] - QUERIES
        return stairs[:queries, most - before : most + queries]

    def seen(self, window: int | None, *, families: bool = True) -> list[SeenRows]:
        """Each part of the rows that decode with the span of positions it reads and its mask, likewise.

        A family reads its prompt once, and `tails` apart, where the window reaches over all and `families` are wanted;
        else its groups read what they have of it each.
        """
        if (window, families) not in self._seen:
            device = self.slots.device
            found: list[SeenRows] = []
            for part in self.groups:
                if isinstance(part, Group):
                    found.append((part, *part.seen(window, device)))
                elif families and (window is None or window >= max(part.lengths)):
                    found.append((part, 0, part.prompt, None))
                else:
                    found += [(group, *group.seen(window, device)) for group in part.groups]
            self._seen[window, families] = found
        return self._seen[window, families]

    def tails(self, family: Family) -> list[tuple[Group, int, int, Tensor | None]]:
        """What a family's groups read behind the prompt."""
        if family.begin not in self._tails:
            device = self.slots.device
            self._tails[family.begin] = [(g, *g.seen(None, device, start=family.prompt)) for g in family.groups]
        return self._tails[family.begin]


def _in_a_row(cached: Tensor) -> Tensor:
    slots, heads, capacity, size = cached.shape
    rows = (slots * heads - heads + 1) * capacity
    return cached.as_strided((heads, rows, size), (capacity * size, size, 1))


def _put(cached: Tensor, rows: Tensor, states: Tensor) -> None:
    """Write states (N, heads, size) at rows (N, heads) of a layer; indexed copies move an element at a time, so in
    elements of 16 bytes where the sizes allow it."""
    cached, piece = cached.view(-1, cached.shape[-1]), 16 // cached.element_size()
    pieces = [*states.stride()[:-1], states.storage_offset(), states.shape[-1]]
    if states.stride(-1) == 1 and not any(number % piece for number in pieces) and states.device.type == "cpu":
        cached, states = cached.view(torch.complex128), states.view(torch.complex128)
    cached.index_put_((rows,), states)
