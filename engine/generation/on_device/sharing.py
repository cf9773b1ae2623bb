"""Continuous batching where prompts have slots of their own (`caches.py`), which all their samples read.

A sample whose prompt is there begins at once, whenever that is, and runs nothing of it: its first step takes the
prompt's last token, whose key and value then stand in the sample's own slot, and draws the first of the answer. A
prompt's slot falls free with its last reader, and serves those that come later until another prompt needs it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.generation.scheduler import Answering, Copy, Scheduler


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
        copies = super().admit()
        self._sort()
        return copies

    def _joins(self, request: int) -> bool:
        """Let a request read a prompt that is cached, or is being cached, if it is."""
        home = self._home_of.get(self._same[request])
        if home is None:
            return False
        sequence = self._take(request)
        sequence.home = home
        self._readers[home] += 1
        self._free_homes.discard(home)
        leader = self._leader_of(sequence.same_prompt)
        if leader is not None:
            leader.followers.append(sequence)
        else:
            sequence.cached = sequence.shared = len(sequence.prompt) - 1
            sequence.last = sequence.prompt[-1]
            self.decoding.append(sequence)
        return True

    def _has_room_for_prompt(self) -> bool:
        return bool(self._free_homes)

    def _home_for(self, sequence: Answering) -> int:
        home = min(self._free_homes)
        self._free_homes.remove(home)
        self._home_of.pop(self._prompt_at.get(home, -1), None)
        self._home_of[sequence.same_prompt], self._prompt_at[home] = home, sequence.same_prompt
        self._readers[home] += 1
        return home

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
