"""The rollout engine: answers from a causal language model.

Models that let their attention be reached by name decode by slots (`continuous.py`): no padding, a place that falls
free is taken at once. Others decode in padded batches (`padded.py`), which is said once. Either way an answer depends
on its prompt, the sampling settings and its stream only: not on the order of the prompts, the batch size or the world
size.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.healing.failure import attempt
from engine.parallel import dist
from engine.rollout.attention import Unserved
from engine.rollout.continuous import SlotDecoder
from engine.rollout.decoding import Drawn
from engine.rollout.padded import run_padded
from engine.rollout.sampling import Ending, Sampling

log = logging.getLogger(__name__)
_told: set[str] = set()


@dataclass(frozen=True)
class Generation:
    """An answer. `token_ids` ends with the end token where `finished`, and holds nothing after it.

    `logprobs` has one number a token: under the distribution that it was drawn from (see `sampling.sample`).
    """

    token_ids: list[int]
    logprobs: list[float]
    finished: bool


class Rollouts:
    """Generates with a plain causal language model of transformers: no hooks, no dropout, whole weights on `device`.

    `cache_bytes` bounds the key-value cache (by default half of the memory that is free); fewer sequences than asked
    for run at a time where it is short. `slots` False decodes in padded batches; `replay` False runs every step through
    the modules, whose hooks and collectives a recording would miss. `ranks` are those whose answers are generated here
    together (`pooling.py`). After the weights were changed, call `refresh`. Raises ValueError for a GPU that is not the
    current one.
    """

    def __init__(
        self, module: nn.Module, device: torch.device | str, cache_bytes: int | None = None, *, slots: bool = True,
        replay: bool = True, ranks: int = 1,
    ) -> None:  # fmt: skip
        self.module, self.device, self.cache_bytes, self.ranks = module, torch.device(device), cache_bytes, ranks
        _check_device(self.device)
        self._slots: SlotDecoder | None = None
        self._replay = replay
        self.most: int | None = None  # sequences that are decoded together at most, since more ran out of memory
        self._fallback = None if slots else "it was told so"  # why the model does not decode by slots

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        batch_size: int = 64,
        samples: int = 1,
        text: Callable[[list[int]], str] | None = None,
    ) -> list[Generation]:
        """`samples` answers a prompt (token ids), in the prompts' order, a prompt's own side by side.

        `streams` names the random stream of each answer: the same stream, seed and prompt give the same answer.
        `batch_size` is how many are decoded at a time, for each of the ranks. Equal prompts are run once. `text` turns
        token ids into text, for stop strings.
        Raises ValueError for a prompt that is empty or too long for the model, and FloatingPointError where the model's
        output is not a number.
        """
        prompts = [prompt for prompt in prompts for _ in range(samples)]
        if len(streams) != len(prompts):
            raise ValueError(f"{len(prompts)} answers need as many streams, not {len(streams)}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        batch_size *= self.ranks
        if not self._replay:  # its forwards have collectives, which other ranks would wait for
            return self._answers(prompts, sampling, streams, batch_size, text)
        while True:
            together = min(batch_size, self.most or batch_size)
            answers, reason = attempt(partial(self._answers, prompts, sampling, streams, together, text))
            if answers is not None:
                return answers
            self._halve(together, reason)

    def _halve(self, together: int, reason: str | None) -> None:
        """After memory ran out: decode half as many at a time from now on. An answer does not depend on that."""
        if together == 1:
            raise ValueError(
                f"out of memory while one sequence is decoded ({reason}); fewer new tokens (rollout.max_new_tokens), "
                "shorter prompts, or a higher ZeRO stage and offload tiers for what rests meanwhile"
            )
        if self.most is None:
            print(f"memory: it ran out with {together} sequences decoded together; fewer are from now on", flush=True)
        self.most = together // 2
        self.release()

    def _answers(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        batch_size: int,
        text: Callable[[list[int]], str] | None,
    ) -> list[Generation]:
        token_ids: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        ending = Ending(sampling, text)
        for drawn in self._run(prompts, sampling, streams, batch_size, ending):
            for place, token, logprob in drawn:
                token_ids[place].append(token)
                logprobs[place].append(logprob)
        finished = [place in ending.ended for place in range(len(prompts))]
        return [Generation(*answer) for answer in zip(token_ids, logprobs, finished, strict=True)]

    def stream(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stream: int = 0,
        text: Callable[[list[int]], str] | None = None,
    ) -> Iterator[int]:
        """The tokens of one answer, each as soon as it is drawn, the end token included."""
        for drawn in self._run([prompt], sampling, [stream], 1, Ending(sampling, text)):
            yield drawn[0][1]

    def refresh(self, changed: Collection[nn.Module] | None = None) -> None:
        """Derive anew what was derived from the weights: those of some modules are others now, by default of all."""
        if self._slots is None:
            self._decoder()  # it derives what it needs
        else:
            self._slots.packs.refresh(changed)

    def release(self) -> None:
        """Free the cache and all that was derived from the weights; the next call takes them again."""
        if self._slots is not None:
            self._slots.release()

    @contextmanager
    def through_modules(self) -> Iterator[None]:
        """Within the block every step runs the module's own code, hooks included; recordings and graphs wait."""
        decoder = self._decoder()
        if decoder is None:
            yield
            return
        recorded, on_device = decoder.recorded, decoder.on_device
        decoder.recorded, decoder.on_device = None, False
        try:
            yield
        finally:
            decoder.recorded, decoder.on_device = recorded, on_device

    @property
    def fallback(self) -> str | None:
        """Why this model decodes in padded batches; None where it decodes by slots."""
        self._decoder()
        return self._fallback

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        batch_size: int,
        ending: Ending,
    ) -> Iterator[list[Drawn]]:
        """What each step drew, checked."""
        if not prompts:
            return
        _check_lengths([len(prompt) for prompt in prompts], sampling.max_new_tokens, self.module.config)
        decoder = self._decoder()
        if decoder is None:
            steps = run_padded(self.module, self.device, prompts, sampling, streams, batch_size, ending)
        else:
            steps = decoder.run(prompts, sampling, streams, min(batch_size, len(prompts)), ending)
        for drawn in steps:
            if any(logprob != logprob for _, _, logprob in drawn):
                raise FloatingPointError("the model's logits are not numbers (NaN); its weights may have diverged")
            yield drawn

    def _decoder(self) -> SlotDecoder | None:
        """The slot decoder, made at first use; None for a model that falls back."""
        if self._slots is None and self._fallback is None:
            try:
                self._slots = SlotDecoder(
                    self.module, self.device, self.cache_bytes, replay=self._replay, ranks=self.ranks
                )
            except Unserved as reason:
                self._fallback = str(reason)
                name = type(self.module).__name__
                if name not in _told and dist.world().leads:
                    _told.add(name)
                    log.warning("%s generates in padded batches, more slowly: %s", name, reason)
        return self._slots


def _check_device(device: torch.device) -> None:
    """Kernels and graphs go to the current GPU, wherever the tensors are."""
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(f"device={device} is not the current GPU: torch.cuda.set_device({device.index}) first")


def _check_lengths(lengths: Sequence[int], max_new_tokens: int, config: Any) -> None:
    if min(lengths) < 1:
        raise ValueError("a prompt must have at least one token")
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and max(lengths) + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {max(lengths)} tokens and {max_new_tokens} new ones do not fit the model's {limit} "
            "positions; use a smaller max_new_tokens or shorter prompts"
        )
