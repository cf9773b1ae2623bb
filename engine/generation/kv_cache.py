"""The key-value cache: prompt slots, which the samples of a prompt share, and answer slots, one per sequence.

A prompt is cached once, whatever the number of its answers and whenever they begin. The last token of the prompt and
the tokens of the answer have a slot for each answer. Memory has a fixed size, and attention reads the tokens in place.
The tokens of one key head are contiguous, so that one query reads memory in order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.host_memory import host_memory, page_aligned, to_device
from engine.parallel import dist

CAPACITY_STEP = 64  # tokens; the capacity of a slot is a multiple of this
PROMPTS_AHEAD = 2  # with little memory: prompt slots as a multiple of the prompts that fill the answer slots
VLLM_SEQUENCES = 1024  # that vLLM decodes at a time: its default for offline use on an H100


@dataclass(frozen=True)
class CacheSize:
    """How many slots a cache has and how many tokens each holds.

    The last answer slot is scratch: rows that only pad a step to a fixed number of rows write there.
    """

    prompt_slots: int
    prompt_capacity: int
    answer_slots: int
    answer_capacity: int

    @property
    def sequences(self) -> int:
        """The number of sequences that can decode at a time."""
        return self.answer_slots - 1

    @property
    def tokens(self) -> int:
        return self.prompt_slots * self.prompt_capacity + self.answer_slots * self.answer_capacity


@dataclass(frozen=True)
class CacheDemand:
    """The demand of one call: longest prompt and answer in tokens, numbers of different prompts and of sequences.

    `batch_size` is the number of sequences that should decode at a time.
    """

    prompt_tokens: int
    answer_tokens: int
    prompts: int
    sequences: int
    batch_size: int

    def size_within(self, tokens: int) -> CacheSize:
        """Return the largest useful size of at most `tokens` tokens; one sequence always fits."""
        prompt, answer = _round_up(self.prompt_tokens), _round_up(self.answer_tokens)
        batch = self.batch_size
        while batch > 1 and (batch + 1) * answer + self._fewest_prompts(batch) * prompt > tokens:
            batch -= 1
        affordable = (tokens - (batch + 1) * answer) // prompt
        prompt_slots = max(self._fewest_prompts(batch), min(affordable, batch, self.prompts))
        return CacheSize(prompt_slots, prompt, batch + 1, answer)

    def fits(self, size: CacheSize, sequences: int) -> bool:
        """Return whether a cache of this size can decode so many sequences of the call, or its batch, at a time."""
        batch = min(sequences, self.batch_size)
        return (
            size.prompt_capacity >= self.prompt_tokens
            and size.answer_capacity >= self.answer_tokens
            and size.sequences >= batch
            and size.prompt_slots >= self._fewest_prompts(batch)
        )

    def _fewest_prompts(self, batch: int) -> int:
        """Return the number of prompt slots with which sequences seldom wait for a prompt slot."""
        return min(batch, self.prompts, -(-PROMPTS_AHEAD * batch * self.prompts // self.sequences))


class LayerCache(NamedTuple):
    """One layer: keys and values (slots, key heads, capacity, head size). Head sizes of keys and values may differ."""

    prompt_keys: Tensor
    prompt_values: Tensor
    answer_keys: Tensor
    answer_values: Tensor

    @property
    def prompt_rows(self) -> tuple[Tensor, Tensor]:
        """Prompt keys and values as views (key heads, rows, size): slot s begins at row s * key heads * capacity."""
        return _as_rows(self.prompt_keys), _as_rows(self.prompt_values)


class KVCache:
    """Keys and values of all layers. The memory of a layer is allocated when its first token arrives."""

    def __init__(self, size: CacheSize, device: torch.device) -> None:
        self.size, self.device = size, device
        self.layers: dict[int, LayerCache] = {}
        self.attention: dict[int, Any] = {}  # by layer, its attention over this cache (engine/generation/attention.py)

    def layer(self, index: int, key: Tensor, value: Tensor) -> LayerCache:
        """Return a layer; the first call allocates it for keys and values of shape (1, key heads, N, head size)."""
        if index not in self.layers:
            prompts = (self.size.prompt_slots, self.size.prompt_capacity)
            answers = (self.size.answer_slots, self.size.answer_capacity)
            self.layers[index] = LayerCache(
                *(_allocate(*slots, states) for slots in (prompts, answers) for states in (key, value))
            )
        return self.layers[index]

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of prompt slots to others, each (source slot, target slot, tokens), all at once."""
        counts = torch.tensor([count for *_, count in copies])
        sources, targets = torch.tensor([slots for *slots, _ in copies]).T.repeat_interleave(counts, dim=1)
        places = torch.cat([*map(torch.arange, counts.tolist())])
        sources, targets, positions = to_device(torch.stack([sources, targets, places]), self.device)
        for layer in self.layers.values():
            for states in (layer.prompt_keys, layer.prompt_values):
                states[targets, :, positions] = states[sources, :, positions]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers.values() for tensor in layer]

    @property
    def token_bytes(self) -> int:
        """The bytes of one token over all layers."""
        return sum(t[0, :, 0].numel() * t.element_size() for layer in self.layers.values() for t in layer[:2])


def free_bytes(device: torch.device) -> int:
    """Return how much memory a device can still provide, the unused memory of PyTorch's allocator included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return host_memory().available


def default_cache_bytes(device: torch.device) -> int:
    """Return half of the free memory; on a CPU, half of this rank's share of it."""
    return free_bytes(device) // (2 * (dist.world().size if device.type == "cpu" else 1))


def _allocate(slots: int, capacity: int, states: Tensor) -> Tensor:
    """Allocate a cache of zeros for one layer.

    Uninitialized memory may contain NaN, and a mask that multiplies by zero does not remove NaN.
    On CPUs the memory is in huge pages, because a step writes to as many pages as there are heads and slots.
    """
    _, heads, _, size = states.shape
    shape = (slots, heads, capacity, size)
    if states.device.type == "cpu":
        return page_aligned(math.prod(shape), states.dtype).view(shape)
    return states.new_zeros(shape)


def _as_rows(cached: Tensor) -> Tensor:
    slots, heads, capacity, size = cached.shape
    rows = (slots * heads - heads + 1) * capacity
    return cached.as_strided((heads, rows, size), (capacity * size, size, 1))


def _round_up(tokens: int) -> int:
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
