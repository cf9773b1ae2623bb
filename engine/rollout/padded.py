"""Decoding in padded batches through transformers' own attention: for models that can't attend over the slot cache.

Prompts are padded on the left. Rows that have ended leave the batch once a good share of it has (the cache is
compacted); the places of those that ended are not filled again.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels import draw
from engine.rollout.cache import kv_cache
from engine.rollout.cache.kv_cache import BufferedCache
from engine.rollout.sampling import Sampling, forbid, penalise, uniforms

COMPACT_BELOW = 0.75  # share of live rows at which the others leave: a copy of the cache against work on dead rows
PREFILL_TOKENS = 8192  # tokens of prompts run at once, padding included: bounds the activations
PREFILL_FILL = 0.75  # a prompt shorter than this share of the longest beside it starts a group of its own


def run_padded(
    module: nn.Module,
    device: torch.device,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    streams: Sequence[int],
    batch_size: int,
    ends: Callable[[int, int], bool],
) -> Iterator[list[tuple[int, int, float]]]:
    """Answer the prompts, `batch_size` at a time; yields what each step drew: (the prompt's place, token, log-prob).

    `ends` says if a prompt's answer ends with a token.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        ended: set[int] = set()
        batch = PaddedDecoding(module, device, [prompts[i] for i in members], sampling, [streams[i] for i in members])
        for rows, tokens, logprobs in batch:
            places = [members[row] for row in rows.tolist()]
            drawn = zip(places, tokens.tolist(), logprobs.tolist(), strict=True)
            live = [one for one in drawn if one[0] not in ended]
            yield live
            ended |= {place for place, token, _ in live if ends(place, token)}
            batch.ended = torch.tensor([place in ended for place in places], device=device)


class PaddedDecoding:
    """The decoding of one batch, longest prompt first.

    Iterating yields, a step, (rows (b,), tokens (b,), log-probabilities (b,)). `rows` are places in the batch as it
    began. Whoever iterates sets `ended` (b,) for those rows; such rows may still be yielded until they are dropped.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
    ) -> None:
        self.module, self.device, self.sampling = module, device, sampling
        config: Any = module.config
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.accepts = _accepted(module)
        self.width = self.prompt_lengths[0]
        capacity = self.width + sampling.max_new_tokens
        self.cache = kv_cache.allocate(config, len(prompts), capacity)
        self.rows = torch.arange(len(prompts), device=device)
        self.lengths = torch.tensor(self.prompt_lengths, device=device)[:, None]  # (b, 1)
        self.mask = (torch.arange(capacity, device=device) >= self.width - self.lengths).long()  # (b, capacity)
        self.padded = self.prompt_lengths[-1] < self.width
        self.prompt_ids = torch.tensor(
            [[sampling.pad_id] * (self.width - len(prompt)) + list(prompt) for prompt in prompts], device=device
        )  # (b, width)
        self.seen: Tensor | None = None  # (b, V), for the repetition penalty
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        places = torch.arange(sampling.max_new_tokens, device=device)
        self.draws = uniforms(sampling.seed, torch.tensor(streams, device=device)[:, None], places)  # (b, max new)

    @torch.inference_mode()
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        asks_every = 1 if self.device.type == "cpu" else 8  # a GPU has to be waited for
        logits, tokens = self._prefill(), None
        for step in range(self.sampling.max_new_tokens):
            if step < self.sampling.min_new_tokens:
                logits = forbid(logits, self.sampling.end_ids)
            if self.sampling.repetition_penalty != 1:
                logits = penalise(logits, self._seen_with(tokens, logits.shape[-1]), self.sampling.repetition_penalty)
            tokens, logprobs = draw(logits, self.sampling, self.draws[:, step])
            yield self.rows, tokens, logprobs
            if step + 1 == self.sampling.max_new_tokens:
                return
            if (step + 1) % asks_every == 0:
                live = (~self.ended).nonzero()[:, 0]
                if len(live) == 0:
                    return
                if len(live) <= COMPACT_BELOW * len(self.rows):
                    tokens = tokens[live]
                    self._keep(live)
            used = self.width + step + 1
            mask = self.mask[:, :used] if self.padded else None
            logits = self._forward(tokens[:, None], self.lengths + step, mask)

    def _seen_with(self, tokens: Tensor | None, vocabulary: int) -> Tensor:
        """(b, V): which tokens stand in each row, those drawn last (b,) included."""
        if self.seen is None:
            self.seen = torch.zeros(len(self.rows), vocabulary, dtype=torch.bool, device=self.device)
            for row, length in enumerate(self.prompt_lengths):
                self.seen[row, self.prompt_ids[row, self.width - length :]] = True
        if tokens is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        return self.seen

    def _prefill(self) -> Tensor:
        """Run the prompts; returns the logits (b, V) of what follows each."""
        positions = (torch.arange(self.width, device=self.device) - self.width + self.lengths).clamp_(min=0)
        mask = self.mask[:, : self.width]
        if not isinstance(self.cache, BufferedCache):
            return self._forward(self.prompt_ids, positions, mask if self.padded else None)
        logits = []
        for rows in _prefill_groups(self.prompt_lengths):
            first = self.width - self.prompt_lengths[rows.start]  # all before is padding
            padded = self.prompt_lengths[rows.stop - 1] < self.prompt_lengths[rows.start]
            self.cache.window(rows, first)
            group = (tensor[rows, first:] for tensor in (self.prompt_ids, positions, mask))
            token_ids, places, visible = group
            logits.append(self._forward(token_ids, places, visible if padded else None))
        self.cache.window(slice(None), 0, self.width)
        return torch.cat(logits)

    def _forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Run new tokens (b, new) at positions (b, new); mask (b, used) is 0 on padding, all that is cached included.

        Returns the logits (b, V) of the last one.
        """
        extra: dict[str, Any] = {}
        if "position_ids" in self.accepts:
            extra["position_ids"] = positions
        if "logits_to_keep" in self.accepts:
            extra["logits_to_keep"] = 1
        output = self.module(
            input_ids=token_ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **extra
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _keep(self, live: Tensor) -> None:
        """Go on with these rows only."""
        self.cache.reorder_cache(live)  # type: ignore[arg-type]
        self.rows, self.lengths, self.mask = self.rows[live], self.lengths[live], self.mask[live]
        self.draws, self.ended = self.draws[live], self.ended[live]
        self.seen = self.seen[live] if self.seen is not None else None


def _prefill_groups(lengths: Sequence[int]) -> list[slice]:
    """Cut rows of falling length into groups to prefill together, with little padding in each."""
    groups, start = [], 0
    for row, length in enumerate(lengths):
        crowded = (row - start + 1) * lengths[start] > PREFILL_TOKENS
        if row > start and (crowded or length < PREFILL_FILL * lengths[start]):
            groups.append(slice(start, row))
            start = row
    return [*groups, slice(start, len(lengths))]


def _accepted(module: nn.Module) -> set[str]:
    """The arguments of the module's forward. Raises ValueError for a model without a key-value cache."""
    names = set(inspect.signature(module.forward).parameters)
    if "past_key_values" not in names:
        raise ValueError(f"{type(module).__name__} keeps no key-value cache, so it can't be decoded here")
    return names
