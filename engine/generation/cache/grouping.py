"""Which rows of a decode step attend together.

A call of PyTorch's attention serves single queries of neighbouring slots, and reads as much for each as for the
longest; our kernel for CPUs takes any slots and lengths in one. Samples of one prompt read that once for all of them,
and apart what is each one's own, where that saves more reading than it costs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from engine.generation.cache.groups import Family, Group
from engine.generation.scheduler import Answering

REGROUP_EVERY = 16  # steps
CALL_COST = 45_000  # cached numbers that PyTorch's attention reads in the time of one more call; measured on a CPU


@dataclass(frozen=True)
class Joining:
    """What reading a family's prompt and tails apart costs, in cached numbers that attention reads meanwhile, and in
    tokens a member; measured on CPUs.
    """

    numbers: int = 0
    tokens: int = 0

    def pays(self, members: int, prompt: int, token_numbers: int) -> bool:
        """Whether reading a prompt of so many tokens once saves more."""
        saved = (members - 1) * prompt - members * self.tokens
        return members > 1 and saved * token_numbers > self.numbers


BY_TORCH, IN_C = Joining(numbers=700_000), Joining(tokens=64)


class Grouping:
    """Cuts the rows of decode steps; a cut is kept for some steps. Families are found where `joining` says its cost."""

    def __init__(self, token_numbers: int, joining: Joining | None) -> None:
        self._token_numbers, self._joining = token_numbers, joining
        self._slots: list[int] = []
        self._plan: list[tuple[int, list[tuple[int, int]]]] = []  # (tokens of a common prompt, cuts of its rows)
        self._age = 0

    def __call__(self, decoding: Sequence[Answering]) -> list[Group | Family]:
        slots, lengths = [s.slot for s in decoding], [s.cached + 1 for s in decoding]
        if slots != self._slots or self._age >= REGROUP_EVERY:
            self._plan, self._slots, self._age = list(self._planned(decoding)), slots, 0
        self._age += 1
        found: list[Group | Family] = []
        for prompt, cuts in self._plan:
            groups = [Group(begin, end, slots[begin], tuple(lengths[begin:end])) for begin, end in cuts]
            found += [Family(prompt, tuple(groups))] if prompt else groups
        return found

    def _planned(self, decoding: Sequence[Answering]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        at = begin = 0
        for _, members in groupby(decoding, key=lambda s: s.same_prompt):
            same = list(members)
            prompt, at = len(same[0].prompt), at + len(same)
            if self._joining is not None and self._joining.pays(len(same), prompt, self._token_numbers):
                yield 0, self._cut(decoding, begin, at - len(same), 0)
                yield prompt, self._cut(decoding, at - len(same), at, prompt)
                begin = at
        yield 0, self._cut(decoding, begin, at, 0)

    def _cut(self, decoding: Sequence[Answering], begin: int, end: int, prompt: int) -> list[tuple[int, int]]:
        rows = decoding[begin:end]
        cuts = cut_into_groups([s.slot for s in rows], [s.cached + 1 - prompt for s in rows], self._token_numbers)
        return [(begin + first, begin + last) for first, last in cuts]


def cut_into_groups(slots: Sequence[int], lengths: Sequence[int], token_numbers: int) -> list[tuple[int, int]]:
    """Cut rows into runs (begin, end) to attend over together: neighbouring slots, not too different lengths.

    A run costs one call and reads its longest length for each row; the cheapest cut is found by dynamic programming.
    """
    call = CALL_COST / token_numbers  # in tokens
    best: list[tuple[float, int]] = [(0.0, 0)]  # (cost, begin of the last run) of the first rows
    for end in range(1, len(slots) + 1):
        longest, candidates = 0, []
        for begin in range(end - 1, -1, -1):
            if begin < end - 1 and slots[begin] + 1 != slots[begin + 1]:
                break
            longest = max(longest, lengths[begin])
            candidates.append((best[begin][0] + call + longest * (end - begin), begin))
        best.append(min(candidates))
    cuts, end = [], len(slots)
    while end > 0:
        cuts.append((best[end][1], end))
        end = best[end][1]
    return cuts[::-1]
