import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.records import Message, Prompt
from pipeline.insight.evaluate import (
    Sample,
    answer_prompts,
    bootstrap_mean,
    gold_scores,
    paired_difference,
    read_samples,
    write_samples,
)
from tests.pipeline.insight.made_runs import HOSTILE

PROMPTS = [Prompt((Message("user", f"What is {n} + 1?"),), "demo") for n in range(3)]


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]


class EchoRollouts:
    """Answers with the prompt's last id and the stream that it was given."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Any, streams: Sequence[int], *, batch_size: int, text: Any
    ) -> list[Answer]:
        assert text([1, 2]) == "1 2"  # what stop strings are looked for in
        return [Answer([ids[-1], stream, batch_size]) for ids, stream in zip(prompts, streams, strict=True)]


class NumberTokenizer:
    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        return [int(messages[-1].content.split()[2])]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def test_answers_come_in_order_with_the_index_as_stream() -> None:
    rollouts: Any = EchoRollouts()
    tokenizer: Any = NumberTokenizer()
    sampling: Any = None
    assert answer_prompts(rollouts, tokenizer, PROMPTS, sampling, batch_size=2) == ["0 0 2", "1 1 2", "2 2 2"]
    assert answer_prompts(rollouts, tokenizer, [], sampling) == []


def test_gold_scores_need_the_demos_prompts() -> None:
    scores = gold_scores(PROMPTS, ["1", "2", "nonsense of the worst kind"])
    assert scores is not None
    assert len(scores) == 3
    assert all(0 <= score <= 1 for score in scores)
    assert gold_scores([*PROMPTS, Prompt(PROMPTS[0].messages, "gsm8k")], ["1"] * 4) is None
    assert gold_scores([], []) is None


def test_paired_difference_agrees_with_the_normal_interval() -> None:
    noise = np.random.default_rng(5)
    before = noise.normal(0.4, 0.3, 400)
    after = before + noise.normal(0.1, 0.2, 400)
    difference = after - before
    mean, low, high = paired_difference(before.tolist(), after.tolist())
    half = 1.959964 * difference.std(ddof=1) / math.sqrt(400)
    assert mean == pytest.approx(difference.mean(), abs=1e-12)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.1 * half)


def test_pairing_is_what_makes_a_difference_clear() -> None:
    before = [float(n) for n in range(50)]
    after = [value + 0.5 + (0.1 if at % 2 else -0.1) for at, value in enumerate(before)]
    _, low, high = paired_difference(before, after)
    assert 0.4 < low < 0.5 < high < 0.6
    _, low_unpaired, high_unpaired = bootstrap_mean(after)
    assert high_unpaired - low_unpaired > 5


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    noise = np.random.default_rng(11)
    hits = 0
    for _ in range(60):
        _, low, high = bootstrap_mean(noise.normal(0.0, 1.0, 60))
        hits += low < 0.0 < high
    assert 0.85 < hits / 60 <= 1.0


def test_the_interval_is_the_same_every_time_and_undefined_for_one_prompt() -> None:
    assert paired_difference([0, 1, 2], [1, 1, 5]) == paired_difference([0, 1, 2], [1, 1, 5])
    mean, low, high = paired_difference([0.25], [0.75])
    assert mean == 0.5
    assert math.isnan(low)
    assert math.isnan(high)


def test_a_difference_of_unequal_or_no_values_is_refused() -> None:
    with pytest.raises(ValueError, match="equally many values, not 1 and 2"):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no values"):
        paired_difference([], [])


def test_samples_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples = [
        Sample((Message("system", "Be brief."), Message("user", HOSTILE)), {"base": "", "sft": HOSTILE}, {"sft": -1.5}),
        Sample((Message("user", "line\nbreak\u2028here"),), {"ppo": "5"}, gold={"ppo": 1.0}),
    ]
    write_samples(path, samples)
    assert read_samples(path) == samples
    assert [item.name for item in tmp_path.iterdir()] == ["samples.jsonl"]


def test_lines_that_are_no_samples_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write_samples(path, [Sample((Message("user", "hi"),), {"sft": "hello"})])
    with path.open("a") as lines:
        lines.write('[1]\n{"prompt": 3}\n{"prompt": [], "answers": null}\nnot json\n{"prompt": [{"role": "us')
    assert len(read_samples(path)) == 1
    assert read_samples(tmp_path / "missing.jsonl") == []


def test_scores_that_are_no_finite_numbers_are_left_out() -> None:
    row = {"prompt": [], "answers": {}, "scores": {"a": float("nan"), "b": None, "c": True, "d": 2}, "gold": None}
    assert Sample.from_row(row).scores == {"d": 2.0}
