"""Read and write samples.jsonl of a stage: held-out prompts with the answers of each model and their scores."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.data.records import Message
from pipeline.files import write_whole

SAMPLES = "samples.jsonl"
GRADES = "evaluations.jsonl"
"""The file with the grades of every evaluation of PPO, one number per held-out prompt."""
BEST_OF = "best_of"
"""The name of the best of several SFT answers, where other answers have the name of a stage or "base"."""


@dataclass(frozen=True)
class Sample:
    """One held-out prompt with the answer of each model ("base", "sft", "dpo", "ppo") at one temperature.

    temperature: the sampling temperature of all answers; 0 is greedy decoding
    scores: the scores that PPO is trained on, from a reward model, a reward function, or their sum
    gold: the scores of the judge
    function: the reward function's share of `scores`, if a reward model scores the answers too
    preferences: the verdicts of a pair judge on the model's answer against the SFT answer, one per order of the two:
        1 is better, 0 is worse, None is no usable verdict

    Each mapping may lack a model.
    """

    prompt: tuple[Message, ...]
    answers: Mapping[str, str]
    scores: Mapping[str, float] = field(default_factory=dict)
    gold: Mapping[str, float] = field(default_factory=dict)
    function: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    preferences: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[tuple[Message, ...], float]:
        """The prompt and the temperature, which identify a sample within a file."""
        return self.prompt, self.temperature

    def to_row(self) -> dict[str, Any]:
        """Return the JSON object of one line of samples.jsonl."""
        row: dict[str, Any] = {
            "prompt": [{"role": message.role, "content": message.content} for message in self.prompt],
            "temperature": self.temperature,
            "answers": dict(self.answers),
        }
        kinds: dict[str, Mapping[str, Any]] = {
            "scores": self.scores,
            "gold": self.gold,
            "function": self.function,
            "preferences": self.preferences,
        }
        return row | {kind: dict(values) for kind, values in kinds.items() if values}

    def merge(self, other: "Sample | None") -> "Sample":
        """Return this sample extended by the answers and scores of models that only `other` has."""
        if other is None:
            return self
        added = other.answers.keys() - self.answers.keys()

        def added_to(own: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
            return {**own, **{model: value for model, value in others.items() if model in added}}

        return Sample(
            self.prompt,
            added_to(self.answers, other.answers),
            added_to(self.scores, other.scores),
            added_to(self.gold, other.gold),
            added_to(self.function, other.function),
            self.temperature,
            added_to(self.preferences, other.preferences),
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Sample":
        """Parse an object that `to_row` made. Raise KeyError, TypeError or AttributeError if `row` is malformed."""
        return cls(
            prompt=tuple(Message(str(turn["role"]), str(turn["content"])) for turn in row["prompt"]),
            answers={str(model): str(answer) for model, answer in row["answers"].items()},
            scores=_numbers(row.get("scores")),
            gold=_numbers(row.get("gold")),
            function=_numbers(row.get("function")),
            temperature=float(row.get("temperature", 1.0)),
            preferences=_pairs(row.get("preferences")),
        )


def _numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    return {
        str(model): float(value)
        for model, value in (values or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _pairs(values: Mapping[str, Any] | None) -> dict[str, tuple[float | None, float | None]]:
    """Return the verdicts for both orders by model. A verdict that is not a number from 0 to 1 is None."""
    found = {}
    for model, pair in (values or {}).items():
        first, second = (value if 0 <= value <= 1 else None for value in map(_number_or_nan, pair))
        found[str(model)] = (first, second)
    return found


def _number_or_nan(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


@dataclass(frozen=True)
class StepGrades:
    """The grades of one evaluation at one temperature: one number per held-out prompt; empty without such grades."""

    step: int
    temperature: float
    scores: tuple[float, ...] = ()
    gold: tuple[float, ...] = ()


def read_grades(path: Path) -> list[StepGrades]:
    """Return the evaluations in `path`. Malformed lines are skipped; a missing file has no evaluations."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            grades = {kind: tuple(map(float, row.get(kind) or ())) for kind in ("scores", "gold")}
            found.append(StepGrades(int(row["step"]), float(row["temperature"]), **grades))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write `samples` as JSON lines. The write is atomic."""
    write_whole(path, "".join(json.dumps(sample.to_row()) + "\n" for sample in samples))


def read_samples(path: Path) -> list[Sample]:
    """Return the samples in `path`. Malformed lines are skipped; a missing file has no samples."""
    if not path.is_file():
        return []
    samples = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            samples.append(Sample.from_row(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return samples
