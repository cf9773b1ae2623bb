"""Answers to held-out prompts, their gold scores, and what a difference between two models is worth.

The same prompts are answered by base, SFT and PPO or DPO model with the same random streams, so that every
comparison is paired: prompt by prompt, and with the same sampling noise.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.data.records import Message, Prompt
from pipeline.files import write_whole

if TYPE_CHECKING:
    from engine import Sampling
    from engine.rollout.rollouts import Rollouts
    from pipeline.data.tokenizer import ChatTokenizer

GOLD_SOURCE = "demo"
RESAMPLES = 4_000


@dataclass(frozen=True)
class Sample:
    """One held-out prompt with what each model ("base", "sft", "dpo", "ppo") answered.

    `scores` are what PPO is trained on, by a reward model, a reward function or both together; `function` is the
    function's part where both score; `gold` are the gold scorer's. A model may be absent from any.
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


def answer_prompts(
    rollouts: "Rollouts",
    tokenizer: "ChatTokenizer",
    prompts: Sequence[Prompt],
    sampling: "Sampling",
    *,
    streams: Sequence[int] | None = None,
    batch_size: int = 64,
) -> list[str]:
    """One answer a prompt, in the order of `prompts`.

    `streams` names the random stream of each (None: its index), so each model that answers meets the same noise.
    """
    if not prompts:
        return []
    prompt_ids = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
    places = list(range(len(prompts))) if streams is None else list(streams)
    generations = rollouts.generate(prompt_ids, sampling, places, batch_size=batch_size, text=tokenizer.decode)
    return [tokenizer.decode(generation.token_ids) for generation in generations]


def gold_scores(prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float] | None:
    """The gold score in [0, 1] of each answer; None unless all prompts are the demo's, for which there is a judge."""
    if not prompts or any(prompt.source != GOLD_SOURCE for prompt in prompts):
        return None
    from pipeline.data.gold import gold_score

    return [gold_score(prompt.messages, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def paired_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Mean of `after - before` over prompts, and its 95% interval.

    The percentile bootstrap over prompts (Efron & Tibshirani, 1993, chapter 13) with a fixed seed: it says how far
    the mean would move with other held-out prompts, not with another training seed. One prompt gives no interval (nan).
    """
    if len(before) != len(after):
        raise ValueError(f"a paired difference needs equally many values, not {len(before)} and {len(after)}")
    return bootstrap_mean(np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64))


def bootstrap_mean(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean of `values` (N,) and its 95% percentile bootstrap interval. Raises ValueError without values."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise ValueError("the mean of no values is undefined")
    mean = float(sample.mean())
    if sample.size == 1:
        return mean, math.nan, math.nan
    # Drawing how often each value is taken, instead of which, keeps this at (RESAMPLES, N) small integers.
    counts = np.random.default_rng(0).multinomial(sample.size, np.full(sample.size, 1 / sample.size), RESAMPLES)
    low, high = np.percentile(counts @ sample / sample.size, [2.5, 97.5])
    return mean, float(low), float(high)
