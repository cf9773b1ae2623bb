"""The parts of a forward, and what each reads of the slot cache: single queries side by side, and runs of prompts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Single queries, columns `begin` to `end` of a forward, of as many neighbouring slots from `slot` on.

    lengths: tokens of each sequence, the new one included.
    """

    begin: int
    end: int
    slot: int
    lengths: tuple[int, ...]

    def seen(self, window: int | None, device: torch.device, *, start: int = 0) -> tuple[int, int, Tensor | None]:
        """The span of positions to read from `start` on, and which of it each row sees: (n, 1, 1, span), or None for
        all.
        """
        last = max(self.lengths)
        starts = [start if window is None else max(start, length - window) for length in self.lengths]
        first = min(starts)
        if min(self.lengths) == last and max(starts) == first:
            return first, last, None
        positions = torch.arange(first, last, device=device)
        mask = positions < torch.tensor(self.lengths, device=device)[:, None]
        if max(starts) > first:
            mask &= positions >= torch.tensor(starts, device=device)[:, None]
        return first, last, mask[:, None, None]


@dataclass(frozen=True)
class Family:
    """Neighbouring columns whose sequences begin with the same prompt of `prompt` tokens, by groups."""

    prompt: int
    groups: tuple[Group, ...]

    @property
    def begin(self) -> int:
        return self.groups[0].begin

    @property
    def end(self) -> int:
        return self.groups[-1].end

    @property
    def slot(self) -> int:
        """Where the prompt is read; each of them has it."""
        return self.groups[0].slot

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, the new one included."""
        return tuple(length for group in self.groups for length in group.lengths)


@dataclass(frozen=True)
class Chunk:
    """Columns `begin` to `end` of a forward: a run of the tokens of slot `slot`, `start` of which are cached."""

    begin: int
    end: int
    slot: int
    start: int

    @property
    def length(self) -> int:
        """Tokens of the sequence once the chunk is written."""
        return self.start + self.end - self.begin

    def first(self, window: int | None) -> int:
        """The first position that it reads."""
        return 0 if window is None else max(0, self.start + 1 - window)

    def masked(self, window: int | None) -> bool:
        """Whether its queries see something else than all before them of what it reads, each of its own tokens one."""
        return self.end - self.begin > 1 and (self.start > 0 or (window is not None and window < self.length))

    def cut(self, most: int) -> Iterator["Chunk"]:
        """The same in runs of at most so many tokens."""
        for begin in range(self.begin, self.end, most):
            yield Chunk(begin, min(begin + most, self.end), self.slot, self.start + begin - self.begin)

    def moved(self, columns: int) -> "Chunk":
        """The same in a forward where it begins so many columns later."""
        return replace(self, begin=self.begin + columns, end=self.end + columns)
