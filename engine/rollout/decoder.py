"""The rollout engine: answers from a causal language model, by batches, with a key-value cache.

Prompts are sorted by length and decoded `batch_size` at a time, padded on the left. Rows that have ended leave the
batch once a good share of it has (the cache is compacted). What a row says depends on its prompt, the sampling settings
and its stream only: not on the order of the prompts, the batch size or the world size.

Left out, for now: refilling the places of finished rows, sharing a prompt's cache between samples.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.rollout import kv_cache
from engine.rollout.kv_cache import BufferedCache
from engine.rollout.sampling import Sampling, forbid, sample, uniforms

COMPACT_BELOW = 0.75  # share of live rows at which the others leave: a copy of the cache against work on dead rows
PREFILL_TOKENS = 8192  # tokens of prompts run at once, padding included: bounds the activations
PREFILL_FILL = 0.75  # a prompt shorter than this share of the longest beside it starts a group of its own


@dataclass(frozen=True)
class Generation:
    """An answer. `token_ids` ends with the end token where `finished`, and holds nothing after it.

    `logprobs` has one number a token: under the distribution that it was drawn from (see `sampling.sample`).
    """

    token_ids: list[int]
    logprobs: list[float]
    finished: bool


class Rollouts:
    """Generates with a plain causal language model of transformers: no hooks, no dropout, whole weights on `device`."""

    def __init__(self, module: nn.Module, device: torch.device | str) -> None:
        self.module, self.device = module, torch.device(device)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        batch_size: int = 64,
    ) -> list[Generation]:
        """One answer a prompt (token ids), in the prompts' order.

        `streams` names the random stream of each: the same stream, seed and prompt give the same answer.
        Raises ValueError for a prompt that is empty or too long for the model, and FloatingPointError where the model's
        output is not a number.
        """
        if len(streams) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many streams, not {len(streams)}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
        answers: dict[int, Generation] = {}
        for start in range(0, len(order), batch_size):
            members = order[start : start + batch_size]
            batch = self._decode([prompts[i] for i in members], sampling, [streams[i] for i in members])
            answers.update(zip(members, batch, strict=True))
        return [answers[index] for index in range(len(prompts))]

    def stream(self, prompt: Sequence[int], sampling: Sampling, stream: int = 0) -> Iterator[int]:
        """The tokens of one answer, each as soon as it is drawn, the end token included."""
        for _, tokens, logprobs in _Decoding(self.module, self.device, [prompt], sampling, [stream]):
            _check_numbers([float(logprobs[0])])
            yield int(tokens[0])

    def _decode(
        self, prompts: list[Sequence[int]], sampling: Sampling, streams: list[int]
    ) -> list[Generation]:
        """One batch of answers."""
        shape = (len(prompts), sampling.max_new_tokens)
        token_ids = torch.full(shape, sampling.pad_id, dtype=torch.long, device=self.device)
        logprobs = torch.zeros(shape, device=self.device)
        decoding = _Decoding(self.module, self.device, prompts, sampling, streams)
        steps = 0
        for steps, (rows, tokens, chosen) in enumerate(decoding, start=1):
            token_ids[rows, steps - 1] = tokens
            logprobs[rows, steps - 1] = chosen
        drawn = zip(token_ids[:, :steps].tolist(), logprobs[:, :steps].tolist(), strict=True)
        return [_cut(ids, values, sampling.end_ids) for ids, values in drawn]


def _cut(token_ids: list[int], logprobs: list[float], end_ids: tuple[int, ...]) -> Generation:
    """End a row after its first end token."""
    length = next((place + 1 for place, token in enumerate(token_ids) if token in end_ids), None)
    _check_numbers(logprobs[:length])
    return Generation(token_ids[:length], logprobs[:length], finished=length is not None)


def _check_numbers(logprobs: Sequence[float]) -> None:
    if any(value != value for value in logprobs):
        raise FloatingPointError("the model's logits are not numbers (NaN); its weights may have diverged")


class _Decoding:
    """The decoding of one batch, longest prompt first.

    Iterating yields, a step, (rows (b,), tokens (b,), log-probabilities (b,)). `rows` are places in the batch as it
    began. Rows that have ended may go on being yielded until they are dropped.
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
        _check_lengths(self.prompt_lengths, sampling.max_new_tokens, config)
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
        self.ends = torch.tensor(sampling.end_ids, dtype=torch.long, device=device)
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        places = torch.arange(sampling.max_new_tokens, device=device)
        self.draws = uniforms(sampling.seed, torch.tensor(streams, device=device)[:, None], places)  # (b, max new)

    @torch.inference_mode()
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        asks_every = 1 if self.device.type == "cpu" else 8  # a GPU has to be waited for
        logits = self._prefill()
        for step in range(self.sampling.max_new_tokens):
            if step < self.sampling.min_new_tokens:
                logits = forbid(logits, self.sampling.end_ids)
            tokens, logprobs = sample(logits, self.sampling, self.draws[:, step])
            yield self.rows, tokens, logprobs
            if step + 1 == self.sampling.max_new_tokens:
                return
            self.ended |= (tokens[:, None] == self.ends).any(-1)
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


def _check_lengths(lengths: Sequence[int], max_new_tokens: int, config: Any) -> None:
    if min(lengths) < 1:
        raise ValueError("a prompt must have at least one token")
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and max(lengths) + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {max(lengths)} tokens and {max_new_tokens} new ones do not fit the model's {limit} "
            "positions; use a smaller max_new_tokens or shorter prompts"
        )
