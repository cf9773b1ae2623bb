"""The votes of an arena: one JSON object per line of RUN/votes.jsonl, and the win rate of one model over another.

A vote for one side has the columns `prompt`, `chosen` and `rejected`, so training reads the file as preferences. A vote
for both or neither side, and a vote with an empty answer, has null in `chosen` and `rejected`.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.evaluation.intervals import wilson_interval
from pipeline.files import json_lines, sync

FILE = "votes.jsonl"
SIDES = ("left", "right")
VOTES = (*SIDES, "both", "neither")


@dataclass(frozen=True)
class Contestant:
    """A model in the arena.

    version: the content hash of the model in the run's manifest; None for a model that the run did not train
    """

    name: str
    version: str | None = None

    def cast(self, answer: str) -> dict[str, Any]:
        """Return this side of a vote."""
        return {"model": self.name, "version": self.version, "answer": answer}

    def gave(self, side: Any) -> bool:
        """Return whether this model gave the answer of a side."""
        return isinstance(side, Mapping) and (side.get("model"), side.get("version")) == (self.name, self.version)


def preference(vote: str, left: str, right: str) -> dict[str, str | None]:
    """Return the columns `chosen` and `rejected` of a vote between two answers."""
    if vote not in SIDES or not left.strip() or not right.strip():
        return {"chosen": None, "rejected": None}
    return {"chosen": left, "rejected": right} if vote == "left" else {"chosen": right, "rejected": left}


class VoteFile:
    """A file of votes. Several processes may append to it at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row to the disk. Raises OSError.

        A line that an earlier process left incomplete, because it was killed, is removed.
        """
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        is_new = not self.path.exists()
        with open(self.path, "a+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            _remove_incomplete_line(stream.fileno())
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        if is_new:
            sync([self.path.parent])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows. Other lines are left out."""
        return filter(None, json_lines(self.path))

    def tally(self, first: Contestant, second: Contestant) -> dict[str, Any]:
        """Return the counts of votes, with the win rate of the first model and the ends of its 95% interval (Wilson).

        Votes on other models, or on other versions of these models, do not count. A vote for both or neither counts as
        half a win. Without votes the rate and its ends are None.
        """
        counts = Counter[str]()
        for row in self.rows():
            left, right, vote = row.get("left"), row.get("right"), row.get("vote")
            if vote not in VOTES:
                continue
            if first.gave(left) and second.gave(right):
                counts[vote] += 1
            elif second.gave(left) and first.gave(right):
                counts[{"left": "right", "right": "left"}.get(vote, vote)] += 1
        wins, losses, both, neither = (counts[vote] for vote in VOTES)
        count, points = counts.total(), wins + (both + neither) / 2
        low, high = wilson_interval(points, count) if count else (None, None)
        return {
            "first": first.name,
            "second": second.name,
            "wins": wins,
            "losses": losses,
            "both": both,
            "neither": neither,
            "votes": count,
            "rate": points / count if count else None,
            "low": low,
            "high": high,
        }


def _remove_incomplete_line(file: int) -> None:
    """Cut off the bytes after the last line feed."""
    end = size = os.fstat(file).st_size
    while end and os.pread(file, 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        os.ftruncate(file, end)
