"""Sequences that decode in one batch: requests come and go between steps, each with its own settings.

On CPUs, and if the generator is streamed, the host reads the tokens of each step before it plans the next. With CUDA
graphs the host launches a window of replays of the step at a time. While the device runs them, the host reads the
tokens of the replays before. Only the host detects stop strings, so the device may decode tokens after the end of an
answer. The host drops these tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.generation.cuda_graph import GraphedStep
from engine.generation.decode_step import NOTHING, DecodeStep
from engine.generation.kv_cache import KVCache
from engine.generation.sampling import Ending, RawLogprobs, Sampled, Sampling, under_seed
from engine.generation.scheduler import ActiveSequence, Scheduler
from engine.host_memory import upload


class SessionToken(NamedTuple):
    """A sampled token of a request.

    logprob: under the distribution that the token was sampled from. raw: see `Sampling.top_logprobs`.
    finish: "stop" if the token ends the answer, "length" if the answer has its longest length, else None.
    """

    request: int
    token: int
    logprob: float
    raw: RawLogprobs | None
    finish: str | None


@dataclass(frozen=True)
class _Launch:
    """Launched steps: the request in each slot, the number of steps, and a function that waits for their tokens."""

    requests: dict[int, int]
    steps: int
    wait: Callable[[], tuple[Tensor, Tensor]]
    in_graphs: bool

    def sampled(self) -> Iterator[list[Sampled]]:
        """Wait for the device, and yield the tokens of each step."""
        tokens, logprobs = (each[: self.steps].tolist() for each in self.wait())
        for step_tokens, step_logprobs in zip(tokens, logprobs, strict=True):
            sampled = [(request, step_tokens[slot], step_logprobs[slot]) for slot, request in self.requests.items()]
            yield [each for each in sampled if each[1] != NOTHING]


@dataclass
class _Request:
    """A live request. `count` is the number of its tokens that the host has read."""

    limit: int
    seed: int
    ends: Callable[[int, int], bool]
    step: DecodeStep
    graphs: GraphedStep | None
    count: int = 0


class DecodeSession:
    """The sequences of one scheduler, which decode in one batch.

    While a session is in use, its decode loop must run no other call, and the weights must not change. Steps in which
    all sequences have the same settings run as CUDA graphs, others run through the modules.
    """

    def __init__(
        self,
        step_for: Callable[[Sampling], tuple[DecodeStep, GraphedStep | None]],
        cache: KVCache,
        scheduler: Scheduler,
        window: int,
    ) -> None:
        """`step_for` returns the step for sampling settings. `window`: replays of a graph per launch; 0 for none."""
        self._step_for, self._cache, self._scheduler, self._window = step_for, cache, scheduler, window
        self._requests: dict[int, _Request] = {}
        self._pending = deque[_Launch]()
        self._turn = 0
        self._finishes: dict[int, str] = {}
        self._raw: dict[int, RawLogprobs] = {}  # of the newest launch, by request

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
    ) -> None:
        """Append a request under a number that no earlier request had. `text` decodes token ids, for stop strings.

        Raises ValueError if the prompt or the longest answer does not fit into a slot.
        """
        size = self._cache.size
        if not 0 < len(prompt) <= size.prompt_capacity or sampling.max_new_tokens > size.answer_capacity:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and an answer of {sampling.max_new_tokens} do not fit into slots of "
                f"{size.prompt_capacity} and {size.answer_capacity} tokens"
            )
        self.register([request], sampling, [sample_seed], Ending(sampling, text))
        self._scheduler.add(request, prompt)

    def register(
        self,
        requests: Sequence[int],
        sampling: Sampling,
        sample_seeds: Sequence[int],
        ends: Callable[[int, int], bool],
    ) -> None:
        """Store the settings of requests that the scheduler has. `ends` returns whether a token ends an answer."""
        step, graphs = self._step_for(sampling)
        seeds = under_seed(sampling.seed, torch.tensor(sample_seeds, dtype=torch.int64)).tolist()
        for request, seed in zip(requests, seeds, strict=True):
            self._requests[request] = _Request(sampling.max_new_tokens, seed, ends, step, graphs)

    def abort(self, request: int) -> None:
        """Remove a request and free its slot. Do nothing for a request that has ended."""
        if self._requests.pop(request, None) is not None:
            self._scheduler.abort(request)

    def step(self) -> list[SessionToken]:
        """Run the next step or steps; return the new tokens, those of a request in order.

        Raises FloatingPointError if logits are NaN.
        """
        sampled = [each for tokens in self.advance() for each in tokens]
        if any(logprob != logprob for _, _, logprob in sampled):
            raise FloatingPointError("the logits of the model are NaN; its weights may have diverged")
        finishes, self._finishes = self._finishes, {}
        newest = {request: index for index, (request, _, _) in enumerate(sampled)}
        return [
            SessionToken(*each, self._raw.get(each[0]), finishes.get(each[0]) if newest[each[0]] == index else None)
            for index, each in enumerate(sampled)
        ]

    def advance(self) -> Iterator[list[Sampled]]:
        """Launch the next steps, and yield the tokens of each step that has finished."""
        with torch.inference_mode():
            launch = self._launch()
        if launch is not None:
            self._pending.append(launch)
            self._turn += 1
        assert self._pending or not self.busy, "no step runs and no answer ends"
        behind = 1 if launch is not None and launch.in_graphs else 0
        while len(self._pending) > behind:
            yield from self._read(self._pending.popleft())

    def _launch(self) -> _Launch | None:
        """Launch the next steps. Return None if every sequence has reached its limit and no request waits."""
        scheduler = self._scheduler
        plan = scheduler.plan()
        for copy in plan.copies:
            self._cache.copy_prefix(*copy)
        if not scheduler.decoding and not plan.chunks:
            return None
        live = [self._requests[sequence.request] for sequence in scheduler.decoding] or [*self._requests.values()]
        step, graphs = live[0].step, self._common_graphs(live)
        step.state.clear()
        steps = 0
        rows = self._below_limit(plan.decoding) if plan.chunks or graphs is None else []
        if rows or plan.chunks or plan.starting:
            samplers = [self._requests[sequence.request].step.sampler for sequence in (*rows, *plan.starting)]
            chosen = upload(_slots_and_firsts(rows), self._cache.device)
            step.run(plan, chosen, [self._table_row(sequence) for sequence in plan.starting], samplers)
            steps = 1
            for sequence in [*rows, *plan.starting]:
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
        in_slots = {slot: self._requests[request].step.sampler.raw_logprobs for slot, request in requests.items()}
        self._raw = {request: in_slots[slot][slot] for slot, request in requests.items() if slot in in_slots[slot]}
        return _Launch(requests, steps, step.state.copy_to_host(self._turn), in_graphs=graphs is not None)

    def _common_graphs(self, live: Sequence[_Request]) -> GraphedStep | None:
        """Return the graphs of these requests if all have the same settings and the settings permit graphs."""
        is_common = len({id(request.step) for request in live}) == 1
        return live[0].graphs if self._window and is_common and live[0].step.sampler.is_capturable else None

    def _read(self, launch: _Launch) -> Iterator[list[Sampled]]:
        """Yield the tokens of a launch's steps, and free the slots of the answers that ended."""
        for sampled in launch.sampled():
            sampled = [one for one in sampled if one[0] in self._requests]
            if sampled:
                yield sampled
            ended = {request for request, token, _ in sampled if self._has_ended(request, token)}
            if ended:
                for request in ended:
                    del self._requests[request]
                self._scheduler.finish(ended)

    def _has_ended(self, number: int, token: int) -> bool:
        request = self._requests[number]
        request.count += 1
        if request.ends(number, token):
            self._finishes[number] = "stop"
        elif request.count == request.limit:
            self._finishes[number] = "length"
        return number in self._finishes

    def _remaining(self, sequence: ActiveSequence) -> int:
        return self._requests[sequence.request].limit - sequence.sampled

    def _below_limit(self, sequences: Sequence[ActiveSequence]) -> list[ActiveSequence]:
        return [sequence for sequence in sequences if self._remaining(sequence) > 0]

    def _table_row(self, sequence: ActiveSequence) -> list[int]:
        """Return the table row of a sequence whose prompt is complete and whose first token is not yet sampled."""
        prompt, request = sequence.prompt, self._requests[sequence.request]
        length = len(prompt.tokens)
        return [prompt.tokens[-1], length - 1, request.seed, 0, request.limit, 0, prompt.slot, length]


def _slots_and_firsts(rows: Sequence[ActiveSequence]) -> tuple[list[int], list[int]]:
    """Return the slot of each row, and the first of its neighbours with the same prompt."""
    firsts: list[int] = []
    for index, sequence in enumerate(rows):
        same = index > 0 and rows[index - 1].prompt is sequence.prompt
        firsts.append(firsts[-1] if same else index)
    return [sequence.slot for sequence in rows], firsts
