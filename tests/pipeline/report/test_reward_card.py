"""The report card of the reward model on the page."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.data import StageReading, read_run
from pipeline.report.report import render_report
from pipeline.report.reward_card import accuracy_chart, reward_card
from tests.pipeline.report.example_runs import HOSTILE, write_demo_run
from tests.pipeline.report.test_report import check

SHARE = {"share": 0.75, "low": 0.61, "high": 0.86, "count": 40}
LEVEL = {"mean": 1.25, "std": 0.5, "count": 40}
CARD: dict[str, Any] = {
    "accuracy": {"all": SHARE, "by_source": {"mine": SHARE, HOSTILE: SHARE}, "chosen_longer": SHARE,
                 "rejected_longer": None},
    "calibration": {"error": 0.0421, "bins": [{"confidence": 0.55, **SHARE}, {"confidence": 0.95, **SHARE}]},
    "margin_by_length": [{"extra_tokens": -4.5, "margin": 0.8, "low": 0.2, "high": 1.4, "count": 10},
                         {"extra_tokens": 6.5, "margin": 0.8, "low": None, "high": None, "count": 1}],
    "judge": {"answers": 90, "rank_correlation": 0.62, "rank_correlation_low": 0.47, "rank_correlation_high": 0.73,
              "same_prompt": SHARE},
    "scores": {"chosen": LEVEL, "rejected": None, "unfinished": {**LEVEL, "penalty": 0.5, "above_complete": SHARE},
               "other_prompt": None, "base": None, "sft": LEVEL},
    "temperatures": [0.7, 0.0],
}  # fmt: skip


def test_the_page_shows_each_part(tmp_path: Path) -> None:
    write_demo_run(tmp_path)
    (tmp_path / "reward" / "card.json").write_text(json.dumps(CARD))
    text = check(render_report(read_run(tmp_path))).text
    for words in (
        "Report card", "Held-out accuracy", "source mine", "chosen is longer", "55% sure",
        "Expected calibration error: 0.042.", "−4.5 tokens", "rank correlation 0.62, 95% interval +0.47 to +0.73",
        "over 90 answers of the SFT model at temperature 0.7, score",
        "Of 40 pairs of answers to the same prompt at temperatures 0.7 and 0",
        "answers of the SFT model, temperatures 0.7 and 0", "75% as the judge does (61% to 86%)",
        "chosen answers, cut in half", "75% (61% to 86%) after a penalty of 0.5",
    ):  # fmt: skip
        assert words in text, words
    assert "answers of the base model" not in text and "+6.5 tokens" not in text


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [("calibration", None, "Calibration"), ("margin_by_length", [], "Margin"), ("judge", None, "Agreement")],
)
def test_a_part_without_data_is_left_out(part: str, value: Any, words: str) -> None:
    assert words in str(reward_card(CARD)) and words not in str(reward_card({**CARD, part: value}))


def test_without_a_card_there_is_no_part_and_without_pairs_no_chart() -> None:
    assert reward_card({}) is None
    shares = {"all": None, "by_source": {}, "chosen_longer": None, "rejected_longer": None}
    assert accuracy_chart(StageReading("reward", card={"accuracy": shares})) is None
    assert accuracy_chart(StageReading("sft")) is None
