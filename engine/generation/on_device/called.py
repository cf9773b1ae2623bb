"""Continuous batching on GPUs where nothing is captured: a generator that is streamed, or split over ranks.

There a forward reads all parameters, or waits for other ranks. So it carries prompts and single tokens together, as on
CPUs (`host_decoding.py`), and the host learns of every token at once. Keys and values lie as static steps have them
(`caches.py`): a prompt once, for all its samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.generation.attention import Unserved, slot_attention
from engine.generation.cache.groups import Chunk
from engine.generation.cache.slots import Step
from engine.generation.host_decoding import Decoding
from engine.generation.on_device.attention import Queries, static_attention
from engine.generation.on_device.caches import WORTH_JOINING, Caches
from engine.generation.on_device.sharing import SharingScheduler, firsts_of
from engine.generation.sampling import Sampling
from engine.generation.scheduler import Answering
from engine.uploads import upload

NAME = "zerochat_mixed_slots"


@dataclass(frozen=True)
class Mixed:
    """What one forward carries: a token of each of `queries`, then `chunks` of prompts; positions (N,) of all."""

    positions: Tensor
    queries: Queries | None
    chunks: Step | None

    @property
    def singles(self) -> int:
        """How many of the tokens are the decoding sequences'."""
        return 0 if self.queries is None else len(self.queries.slots)


def mixed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    slots: Mixed | None = None,
    **how: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, N, head size), key and value (1, key heads, N, head size): each kind by its own attention.

    Returns (1, N, heads, value's head size). Raises Unserved.
    """
    if slots is None:
        raise Unserved(f"{type(module).__name__} asks for another kind of attention")
    said, singles = [], slots.singles
    if slots.queries is not None:
        q, k, v = (states[:, :, :singles] for states in (query, key, value))
        said.append(static_attention(module, q, k, v, attention_mask, slots=slots.queries, **how)[0])
    if slots.chunks is not None:
        q, k, v = (states[:, :, singles:] for states in (query, key, value))
        said.append(slot_attention(module, q, k, v, attention_mask, slots=slots.chunks, **how)[0])
    return torch.cat(said, dim=1), None


class CalledDecoding(Decoding[Mixed]):
    """One call's work; iterating yields what each forward drew."""

    scheduler: SharingScheduler

    def __init__(
        self,
        forward: Callable[[Sequence[int], Mixed, Sequence[int]], Tensor],
        caches: Caches,
        scheduler: SharingScheduler,
        sampling: Sampling,
        streams: Sequence[int],
        ends: Callable[[int, int], bool],
        device: torch.device,
    ) -> None:
        super().__init__(forward, caches.prompts, scheduler, sampling, streams, ends, device)
        self.caches, self.joined = caches, scheduler.most_read >= WORTH_JOINING

    def lay_out(self, decoding: Sequence[Answering], chunks: Sequence[Chunk]) -> Mixed:
        queries = step = None
        if decoding:
            firsts = firsts_of(decoding)
            told = [
                [s.slot, s.cached - s.shared, s.cached + 1, s.home, s.shared, first]
                for s, first in zip(decoding, firsts, strict=True)
            ]
            table = upload([list(column) for column in zip(*told, strict=True)], self.device)
            own, behind, lengths, homes, shared, neighbours = table
            queries = Queries(self.caches, own, behind, lengths, homes, shared, neighbours if self.joined else None)
        places = [place for chunk in chunks for place in range(chunk.start, chunk.length)]
        positions = upload([*(s.cached for s in decoding), *places], self.device)
        if chunks:
            slots = upload([chunk.slot for chunk in chunks for _ in range(chunk.start, chunk.length)], self.device)
            moved = [chunk.moved(-len(decoding)) for chunk in chunks]
            step = Step(self.caches.prompts, slots, positions[len(decoding) :], [], moved)
        return Mixed(positions, queries, step)


AttentionInterface.register(NAME, mixed_attention)
