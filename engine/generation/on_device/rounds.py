"""Decoding in rounds: some of the prompts run, then a window of decode steps, and meanwhile the host reads the round
before.

The host learns of a token a round later than the device; what the device needs to know - which answer ended, which
token comes next - it knows itself (`static_step.py`). So the device never waits: while it runs a round, the host takes
what the last one said, frees slots, and fills them. A sequence that only the host knows to have ended (a stop string)
is decoded on for a round at most, and what is said of it then is dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from engine.generation.cache.slots import Step
from engine.generation.on_device.caches import WORTH_JOINING, Caches
from engine.generation.on_device.forwards import Forwards
from engine.generation.on_device.graphs import Replays
from engine.generation.on_device.sharing import SharingScheduler, firsts_of
from engine.generation.on_device.static_step import DecodeState, StaticStep
from engine.generation.sampling import Sampling, under_seed
from engine.generation.scheduler import Answering
from engine.kernels.decode_rows import NOTHING
from engine.uploads import upload

WINDOW = 8  # decode steps a round: the host asks no sooner
SETTINGS_KEPT = 4  # sampling settings whose graphs are kept

Drawn = tuple[int, int, float]  # the prompt's place, the token, its log-probability
Prefill = Callable[[Sequence[int], Step, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Round:
    """What was launched: the request of each slot that may speak, and what they said, on its way to the host."""

    members: dict[int, int]
    said: Tensor  # (places, slots + 1)
    logprobs: Tensor
    arrived: Callable[[], None]

    def draws(self) -> Iterator[list[Drawn]]:
        """What each step drew. Waits for the device."""
        self.arrived()
        slots = list(self.members)
        tokens, logprobs = self.said[:, slots].tolist(), self.logprobs[:, slots].tolist()
        for said, theirs in zip(tokens, logprobs, strict=True):
            drawn = zip(self.members.values(), said, theirs, strict=True)
            yield [one for one in drawn if one[1] != NOTHING]


class Rounds:
    """Static steps over the same caches, kept from call to call as long as weights and caches stay where they are."""

    def __init__(self, forwards: Forwards, caches: Caches, device: torch.device) -> None:
        self.forwards, self.module, self.caches, self.device = forwards, forwards.module, caches, device
        self.state = DecodeState(caches.slots, WINDOW + 1, device)
        self._host = [_host_copies(self.state) for _ in range(2)]  # a round is read while the next is written
        self._replays: dict[tuple[Sampling, bool], Replays] = {}
        self._addresses = _addresses(self.module)

    @property
    def fit(self) -> bool:
        """Whether these still belong to the module's memory."""
        return self._addresses == _addresses(self.module)

    def replays(self, sampling: Sampling, vocabulary: int, *, joined: bool) -> Replays:
        """The step under these settings; what differs by call alone is told to it by its state."""
        how = replace(sampling, seed=0, stop=(), pad_id=0, max_new_tokens=max(1, sampling.min_new_tokens))
        key = how, joined
        found = self._replays.pop(key, None)
        if found is None:
            step = StaticStep(self.forwards, self.caches, self.state, how, vocabulary, joined=joined)
            found = Replays(step, captures=self.device.type == "cuda")
        self._replays[key] = found
        while len(self._replays) > SETTINGS_KEPT:
            del self._replays[next(iter(self._replays))]
        return found

    def send(self, turn: int, members: dict[int, int]) -> Round:
        """Start what was said on its way to the host."""
        said, logprobs = self._host[turn % 2]
        said.copy_(self.state.said.tokens, non_blocking=True)
        logprobs.copy_(self.state.said.logprobs, non_blocking=True)
        if self.device.type != "cuda":
            return Round(members, said, logprobs, lambda: None)
        event = torch.cuda.Event()
        event.record()
        return Round(members, said, logprobs, event.synchronize)


class DeviceDecoding:
    """One call's work; iterating yields what each forward drew. `prefill` is `SlotDecoder.forward`."""

    def __init__(
        self,
        rounds: Rounds,
        prefill: Prefill,
        scheduler: SharingScheduler,
        sampling: Sampling,
        streams: Sequence[int],
        ends: Callable[[int, int], bool],
    ) -> None:
        self.rounds, self.prefill, self.scheduler, self.sampling, self.ends = rounds, prefill, scheduler, sampling, ends
        self.streams = under_seed(sampling.seed, torch.tensor(streams, dtype=torch.int64)).tolist()
        self.joined = scheduler.most_read >= WORTH_JOINING
        self.drawn = [0] * len(streams)  # as the host knows
        self.live = set(range(len(streams)))

    def __iter__(self) -> Iterator[list[Drawn]]:
        turn, before = 0, None
        while self.scheduler.busy or before is not None:
            with torch.inference_mode():
                launched = self._launch(turn)
            assert launched or before, "nothing runs and nothing ends"
            if before is not None:
                yield from self._take(before)
            turn, before = turn + 1, launched

    def _take(self, before: Round) -> Iterator[list[Drawn]]:
        """What a round drew; slots of answers that ended fall free."""
        for step in before.draws():
            drawn = [one for one in step if one[0] in self.live]
            if drawn:
                yield drawn
            ended = {request for request, token, _ in drawn if self._over(request, token)}
            if ended:
                self.live -= ended
                self.scheduler.finish(ended)

    def _over(self, request: int, token: int) -> bool:
        self.drawn[request] += 1
        return self.ends(request, token) or self.drawn[request] == self.sampling.max_new_tokens

    def _launch(self, turn: int) -> Round | None:
        """A forward over prompts, if any wait for one, and a window of steps; None where nothing is left to run."""
        scheduler = self.scheduler
        for copy in scheduler.admit():
            self.rounds.caches.prompts.copy_prefix(*copy)
        self.rounds.state.begin()
        self._begin([s for s in scheduler.decoding if s.drawn == 0])
        ran = self._run_prompts()
        decoding = [s for s in scheduler.decoding if s.drawn < self.sampling.max_new_tokens]
        members = {s.slot: s.request for s in scheduler.decoding}
        if decoding:
            steps = min(WINDOW, max(self.sampling.max_new_tokens - s.drawn for s in decoding))
            self._replays().run([s.slot for s in decoding], firsts_of(decoding), steps)
            for sequence in decoding:
                sequence.drawn += steps  # at most: it may have ended
        return self.rounds.send(turn, members) if ran or decoding else None

    def _replays(self) -> Replays:
        vocabulary: int = self.rounds.module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        return self.rounds.replays(self.sampling, vocabulary, joined=self.joined)

    def _run_prompts(self) -> bool:
        """One forward over chunks of prompts, and a token for each prompt that is whole then."""
        scheduler, device = self.scheduler, self.rounds.device
        offset = len(scheduler.decoding)
        chunks, members = scheduler.chunks()
        if not chunks:
            return False
        chunks = [chunk.moved(-offset) for chunk in chunks]
        token_ids = [t for c, m in zip(chunks, members, strict=True) for t in m.prompt[c.start : c.length]]
        where = upload(
            [
                [c.slot for c in chunks for _ in range(c.start, c.length)],
                [place for c in chunks for place in range(c.start, c.length)],
            ],
            device,
        )
        whole = [(c, m) for c, m in zip(chunks, members, strict=True) if c.length == len(m.prompt)]
        keep = [chunk.end - 1 for chunk, _ in whole]
        caches = self.rounds.caches
        logits = self.prefill(token_ids, Step(caches.prompts, where[0], where[1], [], chunks), keep)
        caches.take()
        scheduler.ran(members, chunks)
        if whole:
            speakers = [[member, *member.followers] for _, member in whole]
            rows = upload([row for row, each in enumerate(speakers) for _ in each], device)
            self._begin([*chain.from_iterable(speakers)], logits.index_select(0, rows))
        return True

    def _begin(self, sequences: Sequence[Answering], logits: Tensor | None = None) -> None:
        """Tell the device of sequences whose prompts are cached; where there are logits (n, V) after these, draw the
        first tokens from them. A sequence without begins with its prompt's last token.
        """
        if not sequences:
            return
        step, device = self._replays().step, self.rounds.device
        limit = self.sampling.max_new_tokens
        told = [
            [s.prompt[-1], len(s.prompt) - 1, self.streams[s.request], 0, limit, 0, s.home, s.shared] for s in sequences
        ]
        slots, rows = upload([s.slot for s in sequences], device), upload(told, device)
        if step.seen is not None:
            step.seen.index_fill_(0, slots, False)
            at = [s.slot * step.seen.shape[1] + token for s in sequences for token in s.prompt]
            step.seen.view(-1).index_fill_(0, upload(at, device), True)
        if logits is None:
            step.begin(slots, rows)
            return
        step.draw(slots, rows, logits)
        for sequence in sequences:
            sequence.drawn = 1


def _host_copies(state: DecodeState) -> tuple[Tensor, Tensor]:
    """Where tokens and log-probabilities arrive: pinned where there is a GPU, so that nobody waits for the copy."""
    pinned = state.rows.is_cuda
    tokens, logprobs, _ = state.said
    said = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=pinned)
    return said, torch.empty(logprobs.shape, dtype=logprobs.dtype, pin_memory=pinned)


def _addresses(module: nn.Module) -> list[Any]:
    """Where the module's parameters and buffers lie."""
    return [tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]]
