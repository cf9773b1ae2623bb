"""Decoding in batches padded on the left, through transformers' own attention: every prompt runs beside every other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.generation.attention import Unserved
from engine.generation.batches.batch_decoding import PREFILL_TOKENS, BatchDecoding
from engine.generation.cache import kv_cache
from engine.generation.cache.kv_cache import BufferedCache

PREFILL_FILL = 0.75  # a prompt shorter than this share of the longest beside it starts a group of its own


class PaddedDecoding(BatchDecoding):
    """For models with a key-value cache: a mask hides the padding, positions count from each prompt's first token."""

    name, manner = "padded", "in padded batches, more slowly"

    def prepare(self) -> None:
        if not {"past_key_values", "attention_mask"} <= self.accepts:
            raise Unserved("it keeps no key-value cache")
        self.told = "position_ids" in self.accepts
        config: Any = self.module.config
        capacity = self.width + self.sampling.max_new_tokens
        self.cache = kv_cache.allocate(config, len(self.prompt_lengths), capacity)
        self.lengths = torch.tensor(self.prompt_lengths, device=self.device)[:, None]  # (b, 1)
        self.mask = (torch.arange(capacity, device=self.device) >= self.width - self.lengths).long()  # (b, capacity)
        self.padded = self.prompt_lengths[-1] < self.width

    def begin(self) -> Tensor:
        positions = (torch.arange(self.width, device=self.device) - self.width + self.lengths).clamp_(min=0)
        mask = self.mask[:, : self.width]
        if not isinstance(self.cache, BufferedCache):
            return self._forward(self.prompt_ids, positions, mask if self.padded else None)
        logits = []
        for rows in _prefill_groups(self.prompt_lengths):
            # All before is padding; who is told no positions may take them from the cache's length, and so counts it.
            first = self.width - self.prompt_lengths[rows.start] if self.told else 0
            padded = self.prompt_lengths[rows.stop - 1] < self.width - first
            self.cache.window(rows, first)
            group = (tensor[rows, first:] for tensor in (self.prompt_ids, positions, mask))
            token_ids, places, visible = group
            logits.append(self._forward(token_ids, places, visible if padded else None))
        self.cache.window(slice(None), 0, self.width)
        return torch.cat(logits)

    def go_on(self, tokens: Tensor, step: int) -> Tensor:
        mask = self.mask[:, : self.width + step + 1] if self.padded else None
        return self._forward(tokens, self.lengths + step, mask)

    def _forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Run new tokens (b, new) at positions (b, new); mask (b, used) is 0 on padding, all that is cached included.

        Returns the logits (b, V) of the last one.
        """
        extra = {"position_ids": positions} if self.told else {}
        return self._last(
            input_ids=token_ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **extra
        )[0]

    def _keep(self, live: Tensor) -> bool:
        self.cache.reorder_cache(live)  # type: ignore[arg-type]
        self.lengths, self.mask = self.lengths[live], self.mask[live]
        return True


def _prefill_groups(lengths: Sequence[int]) -> list[slice]:
    """Cut rows of falling length into groups to prefill together, with little padding in each."""
    groups, start = [], 0
    for row, length in enumerate(lengths):
        crowded = (row - start + 1) * lengths[start] > PREFILL_TOKENS
        if row > start and (crowded or length < PREFILL_FILL * lengths[start]):
            groups.append(slice(start, row))
            start = row
    return [*groups, slice(start, len(lengths))]
