"""Generation by transformers' `generate`, for models that the slot cache does not support.

`generate` prepares the cache, the masks and the positions of a batch. This module then decodes: `_decode` is a decoding
method for the argument `custom_generate`, and the sampling is that of the decode loop. There are three batching
methods: padded on the left; prompts of one length; prompts of one length without a cache, which runs the complete
sequence again for each token. The first method that reproduces the logits of the plain forward is used.
"""

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from engine.generation.decode_step import COLUMNS, COUNT, LIMIT, NOTHING, DecodeState, Sampler
from engine.generation.model_support import NEW_TOKENS, counts_from_zero, fixed_prompts, logits_differ, plain_logits
from engine.generation.sampling import SampledToken, Sampling, combine_seeds
from engine.internals import attention_name, inputs_of_next_step
from engine.oom import is_out_of_memory

BATCH_TOKENS = 16384  # tokens of a batch, padding and answers included: bounds the activations
PADDING = 0  # any token: no mask is made from ids
Steps = Generator[Tensor, Tensor, None]  # yields the logits (b, V) of each step, receives the tokens (b,) to append


@dataclass(frozen=True)
class Batching:
    """The settings of a call of `generate`. `description` completes "generates with transformers' generate"."""

    name: str
    pads: bool
    use_cache: bool
    description: str


BATCHINGS = (
    Batching("padded", True, True, "in padded batches, more slowly"),
    Batching("same length", False, True, "in batches of prompts of one length, more slowly"),
    Batching("no cache", False, False, "by running complete sequences for each token, many times more slowly"),
)


class TransformersFallback:
    """A model and its batching method. Raises ValueError if no method reproduces the logits of its plain forward."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        chosen = next((batching for batching in BATCHINGS if self._is_exact(batching)), None)
        if chosen is None:
            attention = attention_name(module)
            advice = "; model.attention=eager may avoid that" if attention != "eager" else ""
            raise ValueError(
                f"{type(module).__name__} cannot generate: its logits change with the tokens that follow, as those of "
                f"an encoder do, or with the other sequences of a batch{advice}"
            )
        self.batching, self.mode = chosen, chosen.name

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sample_seeds: Sequence[int],
        batch_size: int,
        ends: Callable[[int, int], bool],
    ) -> Iterator[list[SampledToken]]:
        """Answer the prompts; yield the tokens of each step. `ends` returns whether a token ends a request's answer."""
        lengths = [len(prompt) for prompt in prompts]
        for requests in batches(lengths, batch_size, sampling.max_new_tokens, pads=self.batching.pads):
            seeds = [combine_seeds(sampling.seed, sample_seeds[request]) for request in requests]
            batch = {request: prompts[request] for request in requests}
            yield from self._run_batch(batch, sampling, seeds, ends)

    def refresh(self) -> None:
        """Do nothing: nothing is derived from the weights."""

    def release(self) -> None:
        """Do nothing: a batch frees its memory at its end."""

    def memory(self) -> tuple[list[Tensor], list[Tensor], int]:
        """Return nothing: the weights are those of the module."""
        return [], [], 0

    @torch.inference_mode()
    def _run_batch(
        self,
        prompts: dict[int, Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        ends: Callable[[int, int], bool],
    ) -> Iterator[list[SampledToken]]:
        """Answer the prompts of one batch, by request; yield the tokens of each step. seeds: one per prompt."""
        count, limit = len(prompts), sampling.max_new_tokens
        state, slots = DecodeState(count, 1, limit, self.device), torch.arange(count, device=self.device)
        row = [limit if column == LIMIT else 0 for column in COLUMNS]
        state.start(range(count), [row] * count, seeds)
        counts, limits = state.rows[:count, COUNT], state.rows[:count, LIMIT]
        steps = self._generate([*prompts.values()], self.batching, sampling.max_new_tokens)
        logits = next(steps)
        sampler = Sampler(sampling, state, logits.shape[1])
        for slot, prompt in enumerate(prompts.values()):
            sampler.start(slot, prompt)
        state.step.fill_(0)
        while True:
            sampler(slots, counts, logits)
            tokens, logprobs, ended = (
                each.tolist() for each in (state.tokens[0, :count], state.logprobs[0, :count], counts >= limits)
            )
            sampled = []
            for slot, request in enumerate(prompts):
                if tokens[slot] != NOTHING:
                    is_end = ends(request, tokens[slot])
                    if is_end:
                        limits[slot] = 0
                    finish = "stop" if is_end else "length" if ended[slot] else None
                    sampled.append(SampledToken(request, tokens[slot], logprobs[slot], finish))
            yield sampled
            if bool((counts >= limits).all()):
                return
            logits = steps.send(state.tokens[0, :count].clamp(min=0))

    def _generate(self, prompts: Sequence[Sequence[int]], batching: Batching, new_tokens: int) -> Steps:
        """Return the decoding of one batch, padded on the left, without the model's own generation settings."""
        module: Any = self.module
        width = max(len(prompt) for prompt in prompts)
        padding = [width - len(prompt) for prompt in prompts]
        ids = [[PADDING] * count + list(prompt) for count, prompt in zip(padding, prompts, strict=True)]
        seen = [[0] * count + [1] * (width - count) for count in padding]
        config = GenerationConfig(max_new_tokens=new_tokens, use_cache=batching.use_cache, pad_token_id=PADDING)
        mask = {"attention_mask": torch.tensor(seen, device=self.device)} if self._takes_mask else {}
        # `generate` would use the model's own settings for everything that is not set.
        own, module.generation_config = module.generation_config, GenerationConfig()
        try:
            return module.generate(  # type: ignore[no-any-return]
                torch.tensor(ids, device=self.device),
                generation_config=config,
                custom_generate=partial(_decode, only_tokens=not batching.pads),
                **mask,
            )
        finally:
            module.generation_config = own

    @property
    def _takes_mask(self) -> bool:
        return "attention_mask" in inspect.signature(self.module.forward).parameters

    @torch.inference_mode()
    def _is_exact(self, batching: Batching) -> bool:
        """Return whether the logits of a few greedy answers are those of the plain forward."""
        prompts = sorted(fixed_prompts(self.module), key=len, reverse=True)
        # Several prompts of one length, because the state of some models supports only a single row.
        groups = [prompts] if batching.pads else [[prompt, prompt[::-1]] for prompt in prompts]
        try:
            if batching.pads and not (self._takes_mask and counts_from_zero(self.module, self.device)):
                return False
            return all(self._matches_plain_forward(batching, group) for group in groups)
        except Exception as error:  # a forward that needs other arguments may raise any exception
            if is_out_of_memory(error):
                raise
            return False

    def _matches_plain_forward(self, batching: Batching, prompts: Sequence[list[int]]) -> bool:
        steps = self._generate(prompts, batching, NEW_TOKENS)
        logits = [next(steps)]
        while len(logits) < NEW_TOKENS:
            logits.append(steps.send(logits[-1].argmax(-1)))
        answers = torch.stack(logits, dim=1)  # (b, NEW_TOKENS, V)
        for prompt, own in zip(prompts, answers, strict=True):
            plain = plain_logits(self.module, self.device, prompt + own.argmax(-1).tolist())[len(prompt) - 1 : -1]
            if logits_differ(self.module, own, plain) and not bool(plain.isnan().any()):  # `Generator.run` reports NaN
                return False
        return True


def _decode(
    model: Any,
    input_ids: Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    only_tokens: bool,
    **inputs: Any,
) -> Steps:
    """Run the model on sequences that grow by one token a step; a decoding method of `generate`.

    input_ids: (b, W), the prompts. inputs: those that `generate` prepared. With `only_tokens` the model gets no mask
    and no positions. Without padding it computes its own positions, and those of `generate` may be wrong (RoBERTa).
    """
    unused = ("position_ids", "attention_mask") if only_tokens else ()
    is_first = True
    while True:
        length = 1 if inputs["use_cache"] and not is_first else None
        arguments = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=length, is_first_iteration=is_first, **inputs
        )
        outputs = model(**{name: each for name, each in arguments.items() if name not in unused}, return_dict=True)
        inputs, is_first = inputs_of_next_step(model, outputs, inputs), False
        logits = outputs.logits[:, -1].float()
        del outputs  # the logits of all tokens of the prompts
        tokens = yield logits
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)


def batches(lengths: Sequence[int], batch_size: int, new_tokens: int, *, pads: bool) -> Iterator[list[int]]:
    """Yield the indices of the prompts in batches, long prompts first; without padding, of one length per batch."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch:
            longest = lengths[batch[0]]
            is_full = (len(batch) + 1) * (longest + new_tokens) > BATCH_TOKENS
            if len(batch) == batch_size or is_full or not (pads or lengths[index] == longest):
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch
