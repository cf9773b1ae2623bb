"""The rollout log: the figures of each answer are the sums over its tokens."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config.stage_sections import PpoSection
from pipeline.tracking import metrics
from step3_ppo.log import ROLLOUTS, write_rollout_log
from tests.step3_ppo.example_rollouts import advantages_of, rollout_of

PROMPTS, RESPONSES = [3, 6, 2], [4, 1, 6]


def text(ids: list[int]) -> str:
    """Return text with a character that ends a line for str.splitlines but not in JSON Lines."""
    return "\u2028".join(map(str, ids))


def test_logged_answers_have_their_sums_and_their_step(tmp_path: Path) -> None:
    made = rollout_of(PROMPTS, RESPONSES)
    rollout = replace(made, function=torch.tensor([1.0, 2.0, 3.0]))
    targets = advantages_of(rollout, PpoSection(missing_end_penalty=0.7), kl_coef=0.13)
    for step in (1, 2, 3):
        write_rollout_log(tmp_path, step, rollout, targets, text, answers=2, tokens=step == 3)
    write_rollout_log(tmp_path, 4, rollout, targets, text, answers=0, tokens=True)
    lines = [json.loads(line) for line in (tmp_path / ROLLOUTS).read_text(encoding="utf-8").split("\n") if line]
    assert [line["step"] for line in lines] == [1, 1, 2, 2, 3, 3]
    for place, line in enumerate(lines[-2:]):
        assert (line["prompt"], line["answer"]) == (text(rollout.prompts[place]), text(rollout.responses[place]))
        assert (line["tokens"], line["finished"], line["function_score"]) == (RESPONSES[place], place == 0, place + 1.0)
        assert line["token_ids"] == rollout.responses[place]
        kl = math.fsum(a - b for a, b in zip(line["logprobs"], line["reference"], strict=True))
        assert line["kl"] == pytest.approx(kl, abs=1e-4)
        assert line["reward"] == pytest.approx(line["score"] - 0.7 * place - 0.13 * kl, abs=1e-4)
        assert line["advantage"] == pytest.approx(statistics.fmean(line["advantages"]), abs=1e-5)
        assert len(line["values"]) == len(line["returns"]) == len(line["generator"]) == RESPONSES[place]
    assert "logprobs" not in lines[0]
    metrics.cut(tmp_path / ROLLOUTS, 2)
    assert (tmp_path / ROLLOUTS).read_text(encoding="utf-8").count("\n") == 4
