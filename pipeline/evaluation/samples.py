"""samples.jsonl of a stage: held-out prompts with what each model answered to them, and what that scored."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.data.records import Message
from pipeline.files import write_whole

SAMPLES = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """One held-out prompt with what each model ("base", "sft", "dpo", "ppo") answered.

    `scores` are what PPO is trained on, by a reward model, a reward function or both together; `function` is the
    function's part where both score; `gold` are the judge's. A model may be absent from any.
    """

    prompt: tuple[Message, ...]
    answers: Mapping[str, str]
    scores: Mapping[str, float] = field(default_factory=dict)
    gold: Mapping[str, float] = field(default_factory=dict)
    function: Mapping[str, float] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """The object that stands in one line of samples.jsonl."""
        row: dict[str, Any] = {
            "prompt": [{"role": message.role, "content": message.content} for message in self.prompt],
            "answers": dict(self.answers),
        }
        kinds = {"scores": self.scores, "gold": self.gold, "function": self.function}
        return row | {kind: dict(values) for kind, values in kinds.items() if values}

    def beside(self, other: "Sample | None") -> "Sample":
        """This, and what `other` has of models that are not here."""
        if other is None:
            return self
        new = other.answers.keys() - self.answers.keys()

        def joined(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
            return {**ours, **{model: value for model, value in theirs.items() if model in new}}

        return Sample(
            self.prompt,
            joined(self.answers, other.answers),
            joined(self.scores, other.scores),
            joined(self.gold, other.gold),
            joined(self.function, other.function),
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Sample":
        """The reverse of `to_row`. Raises KeyError, TypeError or AttributeError where `row` is of another form."""
        return cls(
            prompt=tuple(Message(str(turn["role"]), str(turn["content"])) for turn in row["prompt"]),
            answers={str(model): str(answer) for model, answer in row["answers"].items()},
            scores=_numbers(row.get("scores")),
            gold=_numbers(row.get("gold")),
            function=_numbers(row.get("function")),
        )


def _numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    return {
        str(model): float(value)
        for model, value in (values or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write `samples` as JSON lines; the file is whole or not there."""
    write_whole(path, "".join(json.dumps(sample.to_row()) + "\n" for sample in samples))


def read_samples(path: Path) -> list[Sample]:
    """The samples of `path`, lines that are none left out; no file is no samples."""
    if not path.is_file():
        return []
    samples = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            samples.append(Sample.from_row(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return samples
