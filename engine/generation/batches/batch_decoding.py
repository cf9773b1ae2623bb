"""Decoding a batch at a time, for models that can't attend over the slot cache: what all ways of it have in common.

Rows that have ended leave the batch once a good share of it has, where a way can drop them; the places of those that
ended are not filled again.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.generation.sampling import Sampling, forbid, penalise, uniforms
from engine.kernels import draw

COMPACT_BELOW = 0.75  # share of live rows at which the others leave: a copy of the cache against work on dead rows
PREFILL_TOKENS = 8192  # tokens of prompts run at once, padding included: bounds the activations


class BatchDecoding:
    """The decoding of one batch, longest prompt first. What runs the model is each subclass's own.

    Raises Unserved for a model that can't be run so.

    Iterating yields, a step, (rows (b,), tokens (b,), log-probabilities (b,)). `rows` are places in the batch as it
    began. Whoever iterates sets `ended` (b,) for those rows; such rows may still be yielded until they are dropped.
    """

    name: ClassVar[str]
    manner: ClassVar[str]  # "generates ...", for the user
    alike: ClassVar[bool] = False  # whether the prompts of a batch have to be of one length

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
    ) -> None:
        self.module, self.device, self.sampling = module, device, sampling
        self.accepts = set(inspect.signature(module.forward).parameters)
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.width = self.prompt_lengths[0]
        self.rows = torch.arange(len(prompts), device=device)
        self.prompt_ids = torch.tensor(
            [[sampling.pad_id] * (self.width - len(prompt)) + list(prompt) for prompt in prompts], device=device
        )  # (b, width)
        self.seen: Tensor | None = None  # (b, V), for the repetition penalty
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        places = torch.arange(sampling.max_new_tokens, device=device)
        self.draws = uniforms(sampling.seed, torch.tensor(streams, device=device)[:, None], places)  # (b, max new)
        self.prepare()

    @torch.inference_mode()
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        asks_every = 1 if self.device.type == "cpu" else 8  # a GPU has to be waited for
        logits, tokens = self.begin(), None
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
                if len(live) <= COMPACT_BELOW * len(self.rows) and self._keep(live):
                    tokens, self.rows, self.draws = tokens[live], self.rows[live], self.draws[live]
                    self.ended = self.ended[live]
                    self.seen = self.seen[live] if self.seen is not None else None
            logits = self.go_on(tokens[:, None], step)

    def prepare(self) -> None:
        """Take what is kept between tokens. Raises Unserved where the model keeps nothing of the kind."""

    def begin(self) -> Tensor:
        """Run the prompts; returns the logits (b, V) of what follows each."""
        raise NotImplementedError

    def go_on(self, tokens: Tensor, step: int) -> Tensor:
        """Run the tokens (b, 1) that step number `step` drew; returns the logits (b, V) of what follows each."""
        raise NotImplementedError

    def _keep(self, live: Tensor) -> bool:
        """Go on with these rows only; False where that can't be."""
        raise NotImplementedError

    def _last(self, **inputs: Any) -> tuple[Tensor, Any]:
        """The module's forward: the logits (b, V) of the last column, and all that it gave."""
        if "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = 1
        output = self.module(**inputs)
        return output.logits[:, -1], output

    def _seen_with(self, tokens: Tensor | None, vocabulary: int) -> Tensor:
        """(b, V): which tokens stand in each row, those drawn last (b,) included."""
        if self.seen is None:
            self.seen = torch.zeros(len(self.rows), vocabulary, dtype=torch.bool, device=self.device)
            for row, length in enumerate(self.prompt_lengths):
                self.seen[row, self.prompt_ids[row, self.width - length :]] = True
        if tokens is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        return self.seen


def run_batches(
    way: type[BatchDecoding],
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
    for members in _batches([len(prompt) for prompt in prompts], batch_size, sampling.max_new_tokens, way.alike):
        ended: set[int] = set()
        batch = way(module, device, [prompts[i] for i in members], sampling, [streams[i] for i in members])
        for rows, tokens, logprobs in batch:
            places = [members[row] for row in rows.tolist()]
            drawn = zip(places, tokens.tolist(), logprobs.tolist(), strict=True)
            live = [one for one in drawn if one[0] not in ended]
            yield live
            ended |= {place for place, token, _ in live if ends(place, token)}
            batch.ended = torch.tensor([place in ended for place in places], device=device)


def _batches(lengths: Sequence[int], batch_size: int, new: int, alike: bool) -> Iterator[list[int]]:
    """The prompts' places in falling order of their lengths, cut into batches; `alike` ones are of one length each."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        crowded = alike and (len(batch) + 1) * (lengths[place] + new) > PREFILL_TOKENS
        other = alike and bool(batch) and lengths[place] != lengths[batch[0]]
        if batch and (len(batch) == batch_size or crowded or other):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
