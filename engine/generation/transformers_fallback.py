"""Generation by transformers' `generate`, for models that the slot cache does not support.

`generate` only runs the model and its cache. This module does the sampling, the penalties and the ends of answers: a
logits processor samples the tokens of a batch and leaves each as the only possible token of its row. There are three
batching methods: padded on the left; prompts of one length; prompts of one length without a cache, which runs the
complete sequence again for each token. The first method that reproduces the logits of the plain forward is used.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from engine.generation.parity_check import NEW_TOKENS, counts_from_zero, far_apart, fixed_prompts, plain_logits
from engine.generation.sampling import Sampled, Sampling, forbid, penalise, uniforms
from engine.internals import attention_name
from engine.kernels import sample
from engine.oom import is_out_of_memory

BATCH_TOKENS = 16384  # tokens of a batch, padding and answers included: bounds the activations


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
        found = next((batching for batching in BATCHINGS if self._is_exact(batching)), None)
        if found is None:
            attention = attention_name(module)
            advice = "; model.attention=eager may avoid that" if attention != "eager" else ""
            raise ValueError(
                f"{type(module).__name__} cannot generate: its logits change with the tokens that follow, as those of "
                f"an encoder do, or with the other sequences of a batch{advice}"
            )
        self.batching = found

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sample_seeds: Sequence[int],
        batch_size: int,
        ends: Callable[[int, int], bool],
    ) -> Iterator[list[Sampled]]:
        """Answer the prompts; yield the tokens of each step. `ends` returns whether a token ends a request's answer."""
        lengths = [len(prompt) for prompt in prompts]
        for requests in batches(lengths, batch_size, sampling.max_new_tokens, pads=self.batching.pads):
            seeds = [sample_seeds[request] for request in requests]
            batch = _Batch(requests, [prompts[request] for request in requests], sampling, seeds, ends, self.device)
            yield from self._run_batch(batch, sampling)

    def _run_batch(self, batch: "_Batch", sampling: Sampling) -> Iterator[list[Sampled]]:
        """Run `generate` in a thread, and yield the tokens of each step as soon as they are sampled."""
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self._generate(
                    batch.prompts,
                    self.batching,
                    sampling.max_new_tokens,
                    sampling.pad_id,
                    logits_processor=LogitsProcessorList([batch]),
                    stopping_criteria=StoppingCriteriaList([_Ended(batch)]),
                )
            except BaseException as error:
                errors.append(error)
            batch.sampled.put(None)

        thread = Thread(target=work, name="generate", daemon=True)
        thread.start()
        try:
            while (sampled := batch.sampled.get()) is not None:
                yield sampled
        finally:
            batch.cancelled = True
            thread.join()
        if errors:
            raise errors[0]

    @torch.inference_mode()
    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        batching: Batching,
        new_tokens: int,
        pad_id: int,
        *,
        returns_logits: bool = False,
        **others: Any,
    ) -> Any:
        """Call `generate` for one batch, padded on the left, without the model's own generation settings."""
        width = max(len(prompt) for prompt in prompts)
        padding = [width - len(prompt) for prompt in prompts]
        ids = [[pad_id] * count + list(prompt) for count, prompt in zip(padding, prompts, strict=True)]
        seen = [[0] * count + [1] * (width - count) for count in padding]
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=batching.use_cache,
            pad_token_id=pad_id,
            disable_compile=True,
            output_logits=returns_logits,
            return_dict_in_generate=returns_logits,
        )
        mask = {"attention_mask": torch.tensor(seen, device=self.device)} if self._takes_mask else {}
        with _isolated(self.module, only_tokens=not batching.pads):
            return self.module.generate(  # type: ignore[operator]
                torch.tensor(ids, device=self.device), generation_config=config, **mask, **others
            )

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
        generated = self._generate(prompts, batching, NEW_TOKENS, 0, returns_logits=True)
        logits = torch.stack(generated.logits, dim=1)  # (b, NEW_TOKENS, V)
        for prompt, answer, own in zip(prompts, generated.sequences[:, -NEW_TOKENS:].tolist(), logits, strict=True):
            plain = plain_logits(self.module, self.device, prompt + answer)[len(prompt) - 1 : -1]
            if far_apart(self.module, own, plain) and not bool(plain.isnan().any()):  # `Generator.run` reports NaN
                return False
        return True


class _Batch(LogitsProcessor):
    """Samples the tokens of one batch inside `generate`, and puts them into the queue `sampled`."""

    def __init__(
        self,
        requests: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sample_seeds: Sequence[int],
        ends: Callable[[int, int], bool],
        device: torch.device,
    ) -> None:
        self.requests, self.prompts, self.sampling, self.ends = requests, prompts, sampling, ends
        self.sampled: SimpleQueue[list[Sampled] | None] = SimpleQueue()
        self.ended: set[int] = set()
        self.cancelled = False
        self._seeds = torch.tensor(sample_seeds, device=device)
        self._steps = 0
        self._seen: Tensor | None = None  # (b, V): the tokens of each sequence, for the repetition penalty

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sample a token of each row from its logits; return 0 for this token and -inf for all others, (b, V).

        scores: (b, V), the logits.
        """
        settings, logits = self.sampling, scores
        if self._steps < settings.min_new_tokens:
            logits = forbid(logits.clone(), settings.end_ids)
        if settings.repetition_penalty != 1:
            logits = penalise(logits, self._mark_seen(input_ids[:, -1:], logits), settings.repetition_penalty)
        tokens, logprobs = sample(logits, uniforms(settings.seed, self._seeds, self._steps), **settings.filters)
        self._steps += 1
        rows = zip(self.requests, tokens.tolist(), logprobs.tolist(), strict=True)
        live = [row for row in rows if row[0] not in self.ended]
        self.ended |= {request for request, token, _ in live if self.ends(request, token)}
        self.sampled.put(live)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0)

    def _mark_seen(self, last: Tensor, logits: Tensor) -> Tensor:
        """Mark the newest tokens; return (b, V), True for the tokens of prompts and answers.

        last: (b, 1), the newest tokens.
        """
        if self._seen is None:
            self._seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            for row, prompt in enumerate(self.prompts):
                self._seen[row, list(prompt)] = True
        return self._seen.scatter_(1, last, True)


class _Ended(StoppingCriteria):
    def __init__(self, batch: _Batch) -> None:
        self.batch = batch

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return (b,): whether the answer of each row has ended."""
        ended = [self.batch.cancelled or request in self.batch.ended for request in self.batch.requests]
        return torch.tensor(ended, device=input_ids.device)


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


@contextmanager
def _isolated(module: Any, *, only_tokens: bool) -> Iterator[None]:
    """Hide the model's own generation settings, which `generate` would use for everything that is not set.

    With `only_tokens` the model gets no mask and no positions. Without padding it computes its own positions, and the
    positions of `generate` may be wrong (RoBERTa).
    """
    settings, prepare = module.generation_config, module.prepare_inputs_for_generation

    @wraps(prepare)  # `generate` inspects its parameters
    def without_positions(*args: Any, **options: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare(*args, **options)
        return {name: value for name, value in inputs.items() if name not in ("position_ids", "attention_mask")}

    module.generation_config = GenerationConfig()
    if only_tokens:
        module.prepare_inputs_for_generation = without_positions
    try:
        yield
    finally:
        module.generation_config = settings
        module.__dict__.pop("prepare_inputs_for_generation", None)
