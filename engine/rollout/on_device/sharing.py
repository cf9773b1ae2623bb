"""Continuous batching where prompts have slots of their own (`caches.py`), which all their samples read.

A sample whose prompt is there begins at once, whenever that is, and runs nothing of it: its first step takes the
prompt's last token, whose key and value then stand in the sample's own slot, and draws the first of the answer. A
prompt's slot falls free with its last reader, and serves those that come later until another prompt needs it.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.rollout.cache.groups import Chunk
from engine.rollout.scheduler import Answering, Copy, Scheduler


@dataclass
class SharingScheduler(Scheduler):
    """`slots` are for answers, `prompt_slots` for prompts. Copies are from prompt to prompt."""

    prompt_slots: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._free_homes = set(range(self.prompt_slots))
        self._home_of: dict[int, int] = {}  # prompt -> the slot that has it
        self._prompt_at: dict[int, int] = {}  # the same, the other way round
        self._readers = Counter[int]()  # sequences by the slot they read

    @property
    def most_read(self) -> int:
        """Tokens of the longest prompt that several sequences begin with; 0 where there is none."""
        several = (place for place, times in Counter(self._same).items() if times > 1)
        return max((len(self.prompts[place]) for place in several), default=0)

    def admit(self) -> list[Copy]:
        """As `Scheduler.admit`; sequences whose prompt is cached already decode from now on, with no token drawn."""
        copies: list[Copy] = []
        room = self._room()
        put_off: list[int] = []
        while self._waiting and self._free and room > 0:
            request = self._waiting.pop()
            prompt, same = self.prompts[request], self._same[request]
            if same in self._home_of:
                self._join(Answering(request, prompt, heapq.heappop(self._free), same, home=self._home_of[same]))
                continue
            if not self._free_homes:
                self._waiting.append(request)
                break
            source, tokens = self._best_source(prompt)
            if self._comes_soon(prompt, tokens):
                put_off.append(request)
                continue
            home = self._take_home(same)
            if tokens and source != home:
                copies.append((source, home, tokens))
            self._resident[home] = (prompt, tokens)
            self.filling.append(Answering(request, prompt, heapq.heappop(self._free), same, cached=tokens, home=home))
            self._readers[home] += 1
            room -= len(prompt) - tokens
        self._waiting.extend(reversed(put_off))
        self._sort()
        return copies

    def _join(self, sequence: Answering) -> None:
        """Let a sequence read a prompt that is cached, or is being cached."""
        self._readers[sequence.home] += 1
        self._free_homes.discard(sequence.home)
        leader = next((s for s in self.filling if s.same_prompt == sequence.same_prompt), None)
        if leader is not None:
            leader.followers.append(sequence)
            return
        sequence.cached = sequence.shared = len(sequence.prompt) - 1
        self.decoding.append(sequence)

    def _take_home(self, same: int) -> int:
        home = min(self._free_homes)
        self._free_homes.remove(home)
        self._home_of.pop(self._prompt_at.get(home, -1), None)
        self._home_of[same], self._prompt_at[home] = home, same
        return home

    def chunks(self) -> tuple[list[Chunk], list[Answering]]:
        chunks, members = super().chunks()
        return [replace(c, slot=member.home) for c, member in zip(chunks, members, strict=True)], members

    def _hand_on(self, leader: Answering) -> Iterator[Copy]:
        for sequence in [leader, *leader.followers]:
            sequence.cached = sequence.shared = len(leader.prompt)
        return iter(())

    def finish(self, ended: set[int]) -> None:
        """As `Scheduler.finish`, of both kinds of slots."""
        for home in [s.home for s in self.decoding if s.request in ended]:
            self._readers[home] -= 1
            if not self._readers[home]:
                self._free_homes.add(home)
        super().finish(ended)


def firsts_of(decoding: Sequence[Answering]) -> list[int]:
    """Of each sequence the first of its neighbours that read the same prompt."""
    firsts: list[int] = []
    for row, sequence in enumerate(decoding):
        same = row > 0 and decoding[row - 1].home == sequence.home
        firsts.append(firsts[-1] if same else row)
    return firsts
