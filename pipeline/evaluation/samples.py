"""Read and write samples.jsonl of a stage: held-out prompts with the answers of each model and their scores."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, TypeAdapter

from pipeline.data.records import REASONING, Message
from pipeline.files import json_lines, write_atomically

Row = TypeVar("Row")
SAMPLES = "samples.jsonl"
GRADES = "evaluations.jsonl"
"""The file with the grades of every evaluation of PPO, one number per held-out prompt."""
BEST_OF = "best_of"
"""The name of the best of several SFT answers, where other answers have the name of a stage or "base"."""


def _finite(grades: Mapping[str, float]) -> dict[str, float]:
    return {model: grade for model, grade in grades.items() if math.isfinite(grade)}


def _message(row: Mapping[str, Any]) -> Message:
    """Return the message that `Message.to_row` wrote."""
    content = row["content"]
    fields = {key: value for key, value in row.items() if key not in ("role", "content", REASONING)}
    if not content and row["role"] in ("assistant", "tool"):
        fields = {"content": "", **fields}
    written = json.dumps(fields, ensure_ascii=False) if fields else ""
    return Message(row["role"], content, written, row.get(REASONING, ""))


def _messages(prompt: Any) -> Any:
    try:
        return tuple(_message(each) if isinstance(each, Mapping) else each for each in prompt)
    except (KeyError, TypeError) as problem:
        raise ValueError("a prompt is a list of messages") from problem


Grades = Annotated[Mapping[str, float], AfterValidator(_finite)]
"""A number for each model. Numbers in a file that are not finite are left out."""
Prompt = Annotated[tuple[Message, ...], BeforeValidator(_messages)]
KINDS = ("scores", "gold", "function", "preferences")


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

    prompt: Prompt
    answers: Mapping[str, str]
    scores: Grades = field(default_factory=dict)
    gold: Grades = field(default_factory=dict)
    function: Grades = field(default_factory=dict)
    temperature: float = 1.0
    preferences: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[tuple[Message, ...], float]:
        """The prompt and the temperature, which identify a sample within a file."""
        return self.prompt, self.temperature

    def to_row(self) -> dict[str, Any]:
        """Return the JSON object of one line of samples.jsonl."""
        row = asdict(self) | {"prompt": [message.to_row() for message in self.prompt]}
        return {name: value for name, value in row.items() if value or name not in KINDS}

    def merge(self, other: "Sample | None") -> "Sample":
        """Return this sample extended by what only `other` has: answers, and grades of these and of equal answers."""
        if other is None:
            return self
        graded = [model for model, answer in other.answers.items() if self.answers.get(model, answer) == answer]
        merged: dict[str, Any] = {}
        for kind in ("answers", *KINDS):
            mine, others = getattr(self, kind), getattr(other, kind)
            merged[kind] = mine | {model: others[model] for model in graded if model in others and model not in mine}
        return replace(self, **merged)


@dataclass(frozen=True)
class StepGrades:
    """The grades of one evaluation at one temperature: one number per held-out prompt; empty without such grades."""

    step: int
    temperature: float
    scores: tuple[float, ...] = ()
    gold: tuple[float, ...] = ()


_SAMPLE, _STEP_GRADES = TypeAdapter(Sample), TypeAdapter(StepGrades)


def read_grades(path: Path) -> list[StepGrades]:
    """Return the evaluations in `path`. Malformed lines are skipped; a missing file has no evaluations."""
    return [*_valid(_STEP_GRADES, path)]


def _valid(kind: TypeAdapter[Row], path: Path) -> Iterator[Row]:
    """Yield the lines of a file that have the form of `kind`."""
    for row in json_lines(path):
        with suppress(ValueError):
            yield kind.validate_python(row)


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write `samples` as JSON lines. The write is atomic."""
    write_atomically(path, "".join(json.dumps(sample.to_row()) + "\n" for sample in samples))


def read_samples(path: Path) -> list[Sample]:
    """Return the samples in `path`. Malformed lines are skipped; a missing file has no samples."""
    return [*_valid(_SAMPLE, path)]
