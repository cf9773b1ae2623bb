"""Sequences that decode in one batch: requests come and go between steps, each with its own settings.

On CPUs, and if the generator is streamed, the host reads the tokens of each step before it plans the next. With CUDA
graphs the host launches a window of replays of the step at a time. While the device runs them, the host reads the
tokens of the replays before. Only the host detects stop strings, so the device may decode tokens after the end of an
answer. The host drops these tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.generation.decode_step import NOTHING, DecodeStep, Sampler
from engine.generation.sampling import Ending, SampledToken, Sampling, check_logprobs, combine_seeds
from engine.generation.scheduler import ActiveSequence, Scheduler
from engine.host_memory import upload

if TYPE_CHECKING:
    from engine.generation.cuda_graph import GraphedStep


@dataclass(frozen=True)
class _Launch:
    """Launched steps: the request in each slot, the number of steps, and a function that waits for their tokens."""

    requests: dict[int, int]
    steps: int
    wait: Callable[[], tuple[Tensor, Tensor]]
    in_graphs: bool


@dataclass
class _Request:
    """A live request. `count` is the number of its tokens that the host has read."""

    limit: int
    seed: int
    ends: Callable[[int, int], bool]
    sampler: Sampler
    graphs: "GraphedStep | None"
    count: int = 0


class DecodeSession:
    """The sequences of one scheduler, which decode in one batch.

    While a session is in use, the weights must not change. A later session of its decode loop ends it: further steps
    raise RuntimeError. Steps whose sequences have the same settings run as CUDA graphs, others through the modules.
    """

    def __init__(
        self,
        step: DecodeStep,
        sampler_for: Callable[[DecodeStep, Sampling], tuple[Sampler, "GraphedStep | None"]],
        scheduler: Scheduler,
        window: int,
    ) -> None:
        """`window`: replays of a CUDA graph per launch; 0 for no graphs."""
        self._step, self._sampler_for, self._scheduler, self._window = step, sampler_for, scheduler, window
        self._requests: dict[int, _Request] = {}
        self._pending = deque[_Launch]()
        self._number = step.sessions = step.sessions + 1

    @property
    def busy(self) -> bool:
        """Whether a request waits or decodes."""
        return self._scheduler.busy or bool(self._pending)

    @property
    def slots(self) -> int:
        """The number of sequences that can decode at a time."""
        return self._scheduler.slots

    def add(
        self,
        request: int,
        prompt: Sequence[int],
        sampling: Sampling,
        sample_seed: int,
        text: Callable[[list[int]], str] | None = None,
        ends: Callable[[int, int], bool] | None = None,
    ) -> None:
        """Append a request under a number that no earlier request had. `text` decodes token ids, for stop strings.

        ends: returns whether a token ends the answer of a request; by default, the settings decide. Raises ValueError
        if the prompt or the longest answer does not fit into a slot.
        """
        size = self._step.cache.size
        if not 0 < len(prompt) <= size.prompt_capacity or sampling.max_new_tokens > size.answer_capacity:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and an answer of {sampling.max_new_tokens} do not fit into slots of "
                f"{size.prompt_capacity} and {size.answer_capacity} tokens"
            )
        seed, ends = combine_seeds(sampling.seed, sample_seed), ends or Ending(sampling, text)
        sampler, graphs = self._sampler_for(self._step, sampling)
        self._requests[request] = _Request(sampling.max_new_tokens, seed, ends, sampler, graphs)
        self._scheduler.add(request, prompt)

    def abort(self, request: int) -> None:
        """Remove a request and free its slot. Do nothing for a request that has ended."""
        if self._requests.pop(request, None) is not None:
            self._scheduler.abort(request)

    def step(self) -> list[SampledToken]:
        """Run the next step or steps; return the new tokens, those of a request in order.

        Raises FloatingPointError if logits are NaN.
        """
        sampled = [token for tokens in self.advance() for token in tokens]
        check_logprobs(sampled)
        return sampled

    def advance(self) -> Iterator[list[SampledToken]]:
        """Launch the next steps, and yield the tokens of each step that has finished.

        If the launch fails, abort every request before the next call.
        """
        try:
            with torch.inference_mode():
                launch = self._launch()
        except BaseException:
            self._scheduler.forget_prompts()
            raise
        if launch is not None:
            self._pending.append(launch)
        assert self._pending or not self.busy, "no step runs and no answer ends"
        behind = 1 if launch is not None and launch.in_graphs else 0
        while len(self._pending) > behind:
            yield from self._read(self._pending.popleft())

    def _launch(self) -> _Launch | None:
        """Launch the next steps. Return None if every sequence has reached its limit and no request waits."""
        if self._number != self._step.sessions:
            raise RuntimeError("another call of this generator has begun: finish a stream or a session before the next")
        scheduler, step = self._scheduler, self._step
        plan = scheduler.plan()
        if plan.copies:
            step.cache.copy_prefixes(plan.copies)
        if not scheduler.decoding and not plan.chunks:
            return None
        decoding = [self._requests[sequence.request] for sequence in scheduler.decoding]
        graphs = self._common_graphs(decoding or [*self._requests.values()])
        step.state.clear()
        if plan.starting:
            self._start(plan.starting)
        steps, rows = 0, self._below_limit(scheduler.decoding)
        if plan.chunks or (rows and graphs is None):
            samplers = [self._requests[sequence.request].sampler for sequence in rows]
            step.run(upload(_slots_and_firsts(rows), step.cache.device), plan.chunks, samplers)
            steps = 1
            for sequence in rows:
                sequence.sampled += 1
        if graphs is not None and (rows := self._below_limit(scheduler.decoding)):
            times = min(self._window, max(self._remaining(sequence) for sequence in rows))
            graphs.run(*_slots_and_firsts(rows), times)
            steps += times
            for sequence in rows:
                sequence.sampled += times
        if not steps:
            return None
        requests = {sequence.slot: sequence.request for sequence in scheduler.decoding}
        return _Launch(requests, steps, step.state.copy_to_host(), in_graphs=graphs is not None)

    def _common_graphs(self, requests: Sequence[_Request]) -> "GraphedStep | None":
        """Return the graphs of these requests if all have the same settings; None if there are none."""
        is_common = len({id(request.sampler) for request in requests}) == 1
        return requests[0].graphs if self._window and is_common else None

    def _read(self, launch: _Launch) -> Iterator[list[SampledToken]]:
        """Wait for the device, yield the tokens of each step, and free the slots of the answers that ended."""
        for tokens, logprobs in zip(*(each[: launch.steps].tolist() for each in launch.wait()), strict=True):
            sampled = [
                self._to_token(request, slot, tokens[slot], logprobs[slot])
                for slot, request in launch.requests.items()
                if tokens[slot] != NOTHING and request in self._requests
            ]
            ended = {token.request for token in sampled if token.finish is not None}
            for request in ended:
                del self._requests[request]
            self._scheduler.finish(ended)
            if sampled:
                yield sampled

    def _to_token(self, number: int, slot: int, token: int, logprob: float) -> SampledToken:
        request = self._requests[number]
        request.count += 1
        finish = "stop" if request.ends(number, token) else "length" if request.count == request.limit else None
        return SampledToken(number, token, logprob, finish, request.sampler.raw_logprobs.get(slot))

    def _remaining(self, sequence: ActiveSequence) -> int:
        return self._requests[sequence.request].limit - sequence.sampled

    def _below_limit(self, sequences: Sequence[ActiveSequence]) -> list[ActiveSequence]:
        return [sequence for sequence in sequences if self._remaining(sequence) > 0]

    def _start(self, sequences: Sequence[ActiveSequence]) -> None:
        """Write the table rows of sequences that run their first token, the last one of their prompt."""
        rows, seeds = [], []
        for sequence in sequences:
            prompt, request = sequence.prompt, self._requests[sequence.request]
            cached = len(prompt.tokens)
            rows.append([sequence.last, cached, 0, request.limit, prompt.slot, cached])
            seeds.append(request.seed)
            request.sampler.start(sequence.slot, [*prompt.tokens, sequence.last])
        self._step.state.start([sequence.slot for sequence in sequences], rows, seeds)


def _slots_and_firsts(rows: Sequence[ActiveSequence]) -> tuple[list[int], list[int]]:
    """Return the slot of each row, and the first of its neighbours with the same prompt."""
    firsts: list[int] = []
    for index, sequence in enumerate(rows):
        same = index > 0 and rows[index - 1].prompt is sequence.prompt
        firsts.append(firsts[-1] if same else index)
    return [sequence.slot for sequence in rows], firsts
