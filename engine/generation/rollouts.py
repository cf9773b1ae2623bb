"""The rollout engine: answers from a causal language model.

Models that let their attention be reached by name decode by slots (`slot_decoder.py`): no padding, a place that falls
free is taken at once. Others decode in batches (`batches/`), which is said once: padded, or of prompts of one length
with the model's own cache, or without one. The first way that gives the model's own numbers is taken. Either way an
answer depends on its prompt, the sampling settings and its stream only: not on the order of the prompts, the batch size
or the world size.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from engine.generation.attention import Unserved
from engine.generation.batches.batch_decoding import BatchDecoding, run_batches
from engine.generation.batches.padded import PaddedDecoding
from engine.generation.batches.same_length import OwnCacheDecoding, WholeDecoding
from engine.generation.host_decoding import Drawn
from engine.generation.parity_check import (
    NEW_TOKENS,
    counts_from_zero,
    disagreement,
    far_apart,
    fixed_prompts,
    plain_logits,
    tolerance_of,
)
from engine.generation.sampling import Ending, Sampling
from engine.generation.served import positions_of, turns_at
from engine.generation.slot_decoder import SlotDecoder
from engine.oom import attempt, is_out_of_memory
from engine.parallel import dist

log = logging.getLogger(__name__)
WAYS = (PaddedDecoding, OwnCacheDecoding, WholeDecoding)  # of decoding in batches, the fastest first
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
    for run at a time where it is short. `slots` False decodes in batches; `replay` False runs every step through
    the modules, whose hooks and collectives a CUDA graph would miss. After the weights were changed, call `refresh`.
    Raises ValueError for a GPU that is not the current one.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str,
        cache_bytes: int | None = None,
        *,
        slots: bool = True,
        replay: bool = True,
        ranks: int = 1,
    ) -> None:
        self.module, self.device, self.cache_bytes, self.ranks = module, torch.device(device), cache_bytes, ranks
        _check_device(self.device)
        self._slots: SlotDecoder | None = None
        self._positions = positions_of(module)
        self._replay = replay
        self.most: int | None = None  # sequences that are decoded together at most, since more ran out of memory
        self._fallback = None if slots else "it was told so"  # why the model does not decode by slots
        self._batches: type[BatchDecoding] | None = None  # how it decodes then

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

    def held(self) -> tuple[list[Tensor], int]:
        """Keys and values of the slot cache; bytes of packed weights."""
        if self._slots is None:
            return [], 0
        layers = [layer for cache in self._slots.caches for layer in cache.layers.values()]
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)], self._slots.packs.bytes

    @contextmanager
    def through_modules(self) -> Iterator[None]:
        """Within the block every step runs the module's own code, hooks included; CUDA graphs are not replayed."""
        decoder = self._decoder()
        if decoder is None:
            yield
            return
        on_device, decoder.on_device = decoder.on_device, False
        try:
            yield
        finally:
            decoder.on_device = on_device

    @property
    def fallback(self) -> str | None:
        """Why this model does not decode by slots; None where it does."""
        self._decoder()
        return self._fallback

    @property
    def way(self) -> str:
        """How this model decodes: "slots", or "padded", "own cache" or "whole" (`batches/`)."""
        return "slots" if self._decoder() is not None else self._batch_way().name

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
        self._check_lengths([len(prompt) for prompt in prompts], sampling.max_new_tokens)
        decoder = self._decoder()
        if decoder is None:
            way = self._batch_way()
            steps = run_batches(way, self.module, self.device, prompts, sampling, streams, batch_size, ending)
        else:
            steps = decoder.run(prompts, sampling, streams, min(batch_size, len(prompts)), ending)
        for drawn in steps:
            if any(logprob != logprob for _, _, logprob in drawn):
                raise FloatingPointError("the model's logits are not numbers (NaN); its weights may have diverged")
            yield drawn

    def _check_lengths(self, lengths: Sequence[int], max_new_tokens: int) -> None:
        if min(lengths) < 1:
            raise ValueError("a prompt must have at least one token")
        limit = self._positions
        if limit is not None and max(lengths) + max_new_tokens > limit:
            alike = "" if turns_at(self.module) is None else " of the same frequencies (longrope)"
            raise ValueError(
                f"a prompt of {max(lengths)} tokens and {max_new_tokens} new ones do not fit the model's {limit} "
                f"positions{alike}; use a smaller max_new_tokens or shorter prompts"
            )

    def _decoder(self) -> SlotDecoder | None:
        """The slot decoder, made at first use; None for a model that falls back."""
        if self._slots is None and self._fallback is None:
            try:
                self._slots = SlotDecoder(
                    self.module, self.device, self.cache_bytes, replay=self._replay, ranks=self.ranks
                )
            except Unserved as reason:
                self._fallback = str(reason)
                self._batch_way()
        return self._slots

    def _batch_way(self) -> type[BatchDecoding]:
        """The fastest way of decoding in batches that gives the model's own numbers, found at first use.

        Raises ValueError where even running whole sequences does not.
        """
        if self._batches is None:
            name = type(self.module).__name__
            self._batches = next((way for way in WAYS if self._serves(way)), None)
            if self._batches is None:
                attention = self.module.config._attn_implementation  # type: ignore[union-attr]
                advice = "; with model.attention=eager they may not" if attention != "eager" else ""
                raise ValueError(
                    f"{name} can't generate: its logits change with the tokens that follow, as an encoder's do, or "
                    f"with the sequences beside{advice}"
                )
            if name not in _told and dist.world().leads:
                _told.add(name)
                log.warning("%s generates %s: %s", name, self._batches.manner, self._fallback)
        return self._batches

    @torch.inference_mode()
    def _serves(self, way: type[BatchDecoding]) -> bool:
        """Whether a few greedy answers are what the plain forward says."""
        if way is WholeDecoding:  # it is that forward, of several sequences, each again with every token
            return self._keeps_to_itself()
        prompts = sorted(fixed_prompts(self.module), key=len, reverse=True)
        try:
            if way is PaddedDecoding and not counts_from_zero(self.module, self.device):
                return False
            # Of one length, and still more than one: what a family keeps may serve a single row only (RWKV's).
            groups = [[prompt, prompt[::-1]] for prompt in prompts] if way.alike else [prompts]
            return all(self._says_the_same(way, group) for group in groups)
        except Exception as problem:  # whatever a forward that wants something else may say
            if is_out_of_memory(problem):
                raise
            return False

    def _keeps_to_itself(self) -> bool:
        """Whether a sequence's logits stay where its row, what is beside it, and what follows, if anything, are others.

        Few shapes, so that little is rounded otherwise.
        """
        row = max(fixed_prompts(self.module), key=len)
        half = (len(row) + 1) // 2
        other = row[:half] + row[: len(row) - half][::-1]
        found = [
            self.module(input_ids=torch.tensor(rows, device=self.device), use_cache=False).logits[:, :half]
            for rows in ([row, row], [other, row[::-1]], [row[:half]])
        ]
        one, *others = found[0][0], found[0][1], found[1][0], found[2][0]
        diverged = bool(one.isnan().any())  # which the first draw says
        return diverged or not any(far_apart(self.module, each, one) for each in others)

    def _says_the_same(self, way: type[BatchDecoding], prompts: Sequence[list[int]]) -> bool:
        """Whether a batch of prompts, answered greedily, gets the logits of the plain forward."""
        batch = way(self.module, self.device, prompts, Sampling(NEW_TOKENS, temperature=0), [0] * len(prompts))
        seen = [batch.begin()]
        for step in range(NEW_TOKENS - 1):
            seen.append(batch.go_on(seen[-1].argmax(-1)[:, None], step))
        logits = torch.stack(seen, dim=1)  # (b, NEW_TOKENS, V)
        for prompt, mine in zip(prompts, logits, strict=True):
            answer = mine.argmax(-1)
            plain = plain_logits(self.module, self.device, prompt + answer.tolist())[len(prompt) - 1 : -1]
            logprobs = mine.double().log_softmax(-1).gather(-1, answer[:, None])[:, 0].tolist()
            bound = tolerance_of(self.module, plain)
            off = disagreement(plain.double(), answer.tolist(), logprobs, bound) is not None
            if off or far_apart(self.module, mine, plain):
                return False
        return True


def _check_device(device: torch.device) -> None:
    """Kernels and graphs go to the current GPU, wherever the tensors are."""
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(f"device={device} is not the current GPU: torch.cuda.set_device({device.index}) first")
