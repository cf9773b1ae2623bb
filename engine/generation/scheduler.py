"""Continuous batching: plan which sequences decode and which prompt tokens the next forward runs.

Prompts wait in a queue. The next sequence gets a slot as soon as one is free. Its prompt runs in chunks, in the same
forwards as the single tokens of decoding sequences, so that a long prompt does not delay them. The last token of a
prompt is not part of a chunk: it is the first single token of the sequence. Equal prompts run once and stay in a prompt
slot while sequences read it. A prompt that begins like a cached one copies the common beginning. After Yu et al., 2022
("Orca: a distributed serving system for transformer-based generative models").
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_PREFIX = 16  # tokens; a shorter common beginning is not copied


@dataclass(eq=False)
class CachedPrompt:
    """A prompt without its last token, in a prompt slot: `cached` tokens are there, `readers` sequences use it."""

    tokens: list[int]
    slot: int
    cached: int = 0
    readers: int = 0

    @property
    def complete(self) -> bool:
        return self.cached == len(self.tokens)


@dataclass(eq=False)
class ActiveSequence:
    """A sequence with an answer slot. `request` is its index in the call, `sampled` the number of its sampled tokens.

    `last` is the last token of its prompt. If the host runs behind the device, `sampled` is an upper bound: the answer
    may have ended before.
    """

    request: int
    slot: int
    prompt: CachedPrompt
    last: int
    sampled: int = 0


@dataclass(frozen=True)
class Chunk:
    """Tokens of a prompt that one forward runs: those from position `start` on."""

    slot: int
    tokens: Sequence[int]
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Plan:
    """The work of one step, besides the single tokens of the decoding sequences.

    copies: (source slot, target slot, tokens) of prompt slots, to make at once before the forward.
    chunks: tokens of prompts.
    starting: the decoding sequences that run their first token. The last chunk of their prompt may be in the same step.
    """

    copies: list[tuple[int, int, int]]
    chunks: list[Chunk]
    starting: list[ActiveSequence]


@dataclass
class Scheduler:
    """A queue of requests, `slots` answer slots and `prompt_slots` prompt slots.

    A forward runs at most `prefill_tokens` tokens of prompts. Call `add` at any time, `plan` once per step and `finish`
    when answers have ended. `decoding` has the sequences of one prompt next to each other.
    """

    slots: int
    prompt_slots: int
    prefill_tokens: int
    decoding: list[ActiveSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting = deque[tuple[int, list[int]]]()
        self._free = list(range(self.slots))
        self._cached: list[CachedPrompt | None] = [None] * self.prompt_slots
        self._admitted: list[ActiveSequence] = []  # sequences whose prompt is incomplete, in order of admission

    @property
    def busy(self) -> bool:
        return bool(self.decoding or self._admitted or self._waiting)

    @property
    def _filling(self) -> list[CachedPrompt]:
        """The incomplete prompts, in order of admission."""
        return list(dict.fromkeys(sequence.prompt for sequence in self._admitted))

    def add(self, request: int, prompt: Sequence[int]) -> None:
        """Append a request to the queue."""
        self._waiting.append((request, list(prompt)))

    def plan(self) -> Plan:
        """Fill free slots and return the work of the next step, which the caller must then run."""
        copies = self._admit() if self._waiting and self._free else []
        chunks, left = list[Chunk](), self.prefill_tokens
        for prompt in self._filling:
            tokens = prompt.tokens[prompt.cached : prompt.cached + left]
            if tokens:
                start, prompt.cached, left = prompt.cached, prompt.cached + len(tokens), left - len(tokens)
                chunks.append(Chunk(prompt.slot, tokens, start))
        starting = [sequence for sequence in self._admitted if sequence.prompt.complete]
        if starting:
            self._admitted = [sequence for sequence in self._admitted if not sequence.prompt.complete]
            self.decoding = sorted(self.decoding + starting, key=lambda s: (s.prompt.slot, s.slot))
        return Plan(copies, chunks, starting)

    def finish(self, requests: set[int]) -> None:
        """Free the slots of these requests. A prompt stays cached until its slot is needed for another one."""
        self._free_slots([sequence for sequence in self.decoding if sequence.request in requests])
        self.decoding = [sequence for sequence in self.decoding if sequence.request not in requests]

    def abort(self, request: int) -> None:
        """Remove a request in any state, and free its slot. The tokens of its prompt that have run stay cached."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != request)
        self._free_slots([sequence for sequence in self._admitted if sequence.request == request])
        self._admitted = [sequence for sequence in self._admitted if sequence.request != request]
        self.finish({request})

    def forget_prompts(self) -> None:
        """Drop all cached prompts. After a step that failed, the cache may lack tokens of prompts that it planned."""
        self._cached = [None] * self.prompt_slots

    def _free_slots(self, sequences: Sequence[ActiveSequence]) -> None:
        for sequence in sequences:
            heapq.heappush(self._free, sequence.slot)
            sequence.prompt.readers -= 1

    def _admit(self) -> list[tuple[int, int, int]]:
        """Assign free slots to waiting requests; return the copies to make."""
        copies: list[tuple[int, int, int]] = []
        origins: dict[int, int] = {}  # of a target, the slot that has the tokens now
        left = self.prefill_tokens - sum(len(prompt.tokens) - prompt.cached for prompt in self._filling)
        while self._waiting and self._free:
            request, (*tokens, last) = self._waiting[0]
            prompt = next((each for each in self._cached if each is not None and each.tokens == tokens), None)
            if prompt is None:
                slot = self._free_prompt_slot()
                if left <= 0 or slot is None:
                    break
                source, common = self._longest_cached_prefix(tokens)
                prompt = self._cached[slot] = CachedPrompt(tokens, slot, common)
                if common and source != slot:
                    origins[slot] = origins.get(source, source)
                    copies.append((origins[slot], slot, common))
                left -= len(tokens) - common
            self._waiting.popleft()
            prompt.readers += 1
            self._admitted.append(ActiveSequence(request, heapq.heappop(self._free), prompt, last))
        return copies

    def _free_prompt_slot(self) -> int | None:
        """Return a prompt slot without readers, preferably an empty one; None if every slot has readers."""
        free = [
            (prompt is not None, slot) for slot, prompt in enumerate(self._cached) if not (prompt and prompt.readers)
        ]
        return min(free)[1] if free else None

    def _longest_cached_prefix(self, tokens: list[int]) -> tuple[int, int]:
        """Return the prompt slot with the longest common prefix, and its length; (0, 0) if it is below MIN_PREFIX."""
        best, source = 0, 0
        for slot, other in enumerate(self._cached):
            usable = min(other.cached, len(tokens)) if other is not None else 0
            if other is not None and usable > best and other.tokens[best] == tokens[best]:
                pairs = zip(tokens[:usable], other.tokens, strict=False)
                common = next((index for index, (one, two) in enumerate(pairs) if one != two), usable)
                if common > best:
                    best, source = common, slot
        return (source, best) if best >= MIN_PREFIX else (0, 0)


def queue_order(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the order of requests: long prompts first, to avoid a long tail, and equal prompts next to each other."""
    return sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), tuple(prompts[i])))
