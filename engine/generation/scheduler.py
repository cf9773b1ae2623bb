"""Continuous batching: which sequence is in which slot, and what the next forward carries.

Prompts wait in a queue. A slot that falls free takes the next one at once, whose prompt then runs in chunks beside the
single tokens of the sequences that decode, so that a long prompt does not hold those up. A prompt that begins as one
that is in the cache already takes that part from there. Samples of one prompt that are admitted together run it once
and draw their first tokens from the same logits. After Yu et al., 2022 ("Orca: a distributed serving system for
transformer-based generative models").
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.generation.cache.groups import Chunk

SHARED_AT_LEAST = 16  # tokens of a common beginning that are worth a copy

Copy = tuple[int, int, int]  # from a slot, to a slot, so many tokens


@dataclass
class Answering:
    """A prompt that is being answered. `cached` of its tokens are in the slot; `drawn` tokens stand of the answer.

    Equal prompts have the same number `same_prompt`. `followers` wait for this one to run the prompt for them all.
    `home` is the slot that has the prompt: the sequence's, or where prompts have slots of their own
    (`on_device/sharing.py`) one of those; `shared` is how many of the cached tokens are there then.
    """

    request: int
    prompt: Sequence[int]
    slot: int
    same_prompt: int
    home: int
    cached: int = 0
    drawn: int = 0
    last: int = 0  # the token drawn last, which the next forward takes
    followers: list["Answering"] = field(default_factory=list)
    shared: int = 0


@dataclass
class Scheduler:
    """The queue and the slots. `admit` fills free slots, `chunks` says what of the prompts runs next."""

    prompts: Sequence[Sequence[int]]
    slots: int
    prefill_tokens: int
    decoding: list[Answering] = field(default_factory=list)  # by slot, those of one prompt together
    filling: list[Answering] = field(default_factory=list)  # in order of admission

    def __post_init__(self) -> None:
        """Long prompts first: neighbours in the cache are then of like length, and equal prompts stand together."""
        order = sorted(range(len(self.prompts)), key=lambda i: (-len(self.prompts[i]), tuple(self.prompts[i])))
        self._waiting = order[::-1]  # the next is the last
        first: dict[tuple[int, ...], int] = {}
        self._same = [first.setdefault(tuple(prompt), i) for i, prompt in enumerate(self.prompts)]
        self._free = list(range(self.slots))
        self._resident: dict[int, tuple[Sequence[int], int]] = {}  # slot -> prompt, tokens of it in the cache

    @property
    def busy(self) -> bool:
        return bool(self.decoding or self.filling or self._waiting)

    def admit(self) -> list[Copy]:
        """Give free slots to waiting prompts; returns the copies to make."""
        copies: list[Copy] = []
        room = self._room()
        put_off: list[int] = []
        while self._waiting and self._free:
            request = self._waiting.pop()
            prompt = self.prompts[request]
            if self._joins(request):
                continue
            if room <= 0 or not self._has_room_for_prompt():
                self._waiting.append(request)
                break
            source, tokens = self._best_source(prompt)
            if self._comes_soon(prompt, tokens):
                put_off.append(request)
                continue
            sequence = self._take(request)
            sequence.cached, sequence.home = tokens, self._home_for(sequence)
            if tokens and source != sequence.home:
                copies.append((source, sequence.home, tokens))
            self._resident[sequence.home] = (prompt, tokens)
            self.filling.append(sequence)
            room -= len(prompt) - tokens
        self._waiting.extend(reversed(put_off))
        return copies

    def _take(self, request: int) -> Answering:
        """The sequence of a request, in a free slot."""
        slot = heapq.heappop(self._free)
        return Answering(request, self.prompts[request], slot, self._same[request], home=slot)

    def _joins(self, request: int) -> bool:
        """Let a request follow the one that runs its prompt, if one does."""
        leader = self._leader_of(self._same[request])
        if leader is not None:
            leader.followers.append(self._take(request))
        return leader is not None

    def _leader_of(self, same: int) -> Answering | None:
        return next((s for s in self.filling if s.same_prompt == same), None)

    def _has_room_for_prompt(self) -> bool:
        """Whether there is a slot to run a prompt in, beside the sequence's."""
        return True

    def _home_for(self, sequence: Answering) -> int:
        """The slot that its prompt is to be cached in."""
        return sequence.slot

    def _room(self) -> int:
        """Tokens of prompts that the next forward has room for."""
        return self.prefill_tokens - sum(len(s.prompt) - s.cached for s in self.filling)

    def _comes_soon(self, prompt: Sequence[int], tokens: int) -> bool:
        """Whether the prompts that run now will bring much more of this one's beginning than so many tokens."""
        soon = max((min(_shared(prompt, other.prompt), len(prompt) - 1) for other in self.filling), default=0)
        return soon - tokens >= max(SHARED_AT_LEAST, len(prompt) // 2)

    def _best_source(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The slot that holds most of the prompt's beginning, and how much; the last token always runs."""
        best, source = 0, 0
        for slot, (held, tokens) in self._resident.items():
            usable = min(tokens, len(held), len(prompt) - 1)
            if usable > best and held[best] == prompt[best]:  # few are compared whole, however many begin alike
                shared = min(_shared(prompt, held), usable)
                if shared > best:
                    best, source = shared, slot
        return (source, best) if best >= SHARED_AT_LEAST else (0, 0)

    def chunks(self) -> tuple[list[Chunk], list[Answering]]:
        """What of the prompts runs beside the decoding sequences, and the sequence of each."""
        chunks, members, column, room = [], [], len(self.decoding), self.prefill_tokens
        for sequence in self.filling:
            tokens = min(room, len(sequence.prompt) - sequence.cached)
            if tokens > 0:
                chunks.append(Chunk(column, column + tokens, sequence.home, sequence.cached))
                members.append(sequence)
                column, room = column + tokens, room - tokens
        return chunks, members

    def ran(self, members: Sequence[Answering], chunks: Sequence[Chunk]) -> list[Copy]:
        """Note that chunks are in the cache; sequences whose prompt is complete begin to decode.

        Returns the copies to make before the next forward, as `admit` does.
        """
        for sequence, chunk in zip(members, chunks, strict=True):
            sequence.cached = chunk.length
            self._resident[chunk.slot] = (sequence.prompt, sequence.cached)
        copies: list[Copy] = []
        for sequence in [s for s in self.filling if s.cached == len(s.prompt)]:
            copies += self._hand_on(sequence)
            self.decoding += [sequence, *sequence.followers]
        self.filling = [s for s in self.filling if s.cached < len(s.prompt)]
        self._sort()
        return copies

    def _hand_on(self, leader: Answering) -> Iterator[Copy]:
        """Give followers the prompt that their leader ran."""
        for follower in leader.followers:
            follower.cached = leader.cached
            self._resident[follower.slot] = (follower.prompt, follower.cached)
            yield leader.slot, follower.slot, follower.cached

    def _sort(self) -> None:
        lowest: dict[int, int] = {}
        for sequence in self.decoding:
            lowest[sequence.same_prompt] = min(sequence.slot, lowest.get(sequence.same_prompt, sequence.slot))
        self.decoding.sort(key=lambda s: (lowest[s.same_prompt], s.slot))

    def finish(self, ended: set[int]) -> None:
        """Free the slots of these requests. What they hold may be copied from until it is overwritten."""
        for sequence in self.decoding:
            if sequence.request in ended:
                heapq.heappush(self._free, sequence.slot)
        self.decoding = [s for s in self.decoding if s.request not in ended]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with in common."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
