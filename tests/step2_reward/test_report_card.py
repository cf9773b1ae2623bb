"""The answers of the report card, with a scorer that sums token ids."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.encode import PairItem
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.data.records import Message
from pipeline.evaluation.pair_accuracy import Scored
from pipeline.evaluation.samples import SAMPLES, Sample, write_samples
from step2_reward.report_card import CARD, ScorePairs, answer_of_next, cut_in_half, write_card


def pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> PairItem:
    sides = (np.array([*prompt, *answer], dtype=np.int32) for answer in (chosen, rejected))
    return PairItem(*sides, 0.0, "source", len(prompt))


PAIRS = [pair([5, 6], [10, 20, 30, 40, 2], [1, 2]), pair([7], [50, 2], [8, 9, 2]), pair([8, 8, 8], [3, 4, 2], [1, 2])]


def by_sum(pairs: Sequence[PairItem]) -> list[Scored]:
    return [Scored(each, float(each.chosen.sum()), float(each.rejected.sum())) for each in pairs]


def test_a_truncated_answer_ends_like_in_ppo() -> None:
    assert cut_in_half(PAIRS[0], 2).tolist() == [5, 6, 10, 2]
    assert cut_in_half(PAIRS[1], 2).tolist() == [7, 2]
    assert PAIRS[0].chosen.tolist() == [5, 6, 10, 20, 30, 40, 2]


def test_the_answer_to_another_prompt_is_from_the_next_pair() -> None:
    assert [answer_of_next(PAIRS, at, 20).tolist() for at in range(3)] == [
        [5, 6, 50, 2], [7, 3, 4, 2], [8, 8, 8, 10, 20, 30, 40, 2],
    ]  # fmt: skip
    same = [pair([5], [10, 2], [1, 2]), pair([5], [11, 2], [1, 2]), pair([6], [12, 2], [1, 2])]
    assert [answer_of_next(same, at, 20).tolist() for at in range(3)] == [[5, 12, 2], [5, 12, 2], [6, 10, 2]]
    assert [answer_of_next(same[:2], at, 20).tolist() for at in range(2)] == [[5, 11, 2], [5, 10, 2]]


def test_a_long_answer_to_another_prompt_fits_into_the_model(tmp_path: Path) -> None:
    """A model with learned positions would raise IndexError for a longer sequence, at the end of the stage."""
    seen: list[int] = []

    def scores(pairs: Sequence[PairItem]) -> list[Scored]:
        seen.extend(len(each.chosen) for each in pairs)
        return by_sum(pairs)

    held_out = [pair([5] * 15, [10, 2], [1, 2]), pair([7], [50] * 18, [8, 9, 2])]
    card_of(tmp_path, held_out, scores)
    assert max(seen) == 20


def card_of(folder: Path, held_out: list[PairItem], scores: ScorePairs = by_sum) -> dict[str, Any]:
    (folder / "reward").mkdir()
    words = train_tokenizer(["some words"], 280)
    level = {"reward_mean": 3.0, "reward_std": 4.0}
    write_card(folder / "reward", by_sum(held_out), scores, words, reference=level, penalty=0.5, max_length=20)
    actual: dict[str, Any] = json.loads((folder / "reward" / CARD).read_text())
    assert (actual["reward_mean"], actual["reward_std"]) == (3.0, 4.0)
    return actual


def test_the_card_scores_each_kind_of_answer(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    words = train_tokenizer(["some words"], 280)
    prompt = (Message("user", "a"),)
    samples = [
        Sample(prompt, {"base": "b", "sft": "some"}, gold={"sft": 0.5}),
        Sample(prompt, {"base": "b" * 40, "sft": "words"}, gold={"sft": 1.0}, temperature=0.0),
    ]
    write_samples(tmp_path / "sft" / SAMPLES, samples)
    actual = card_of(tmp_path, PAIRS)
    scores = actual["scores"]
    assert scores["chosen"]["mean"] == pytest.approx((113 + 59 + 33) / 3) and scores["chosen"]["count"] == 3
    assert scores["unfinished"]["mean"] == pytest.approx((21 + 7 + 24) / 3 + words.end_id)
    assert scores["unfinished"]["penalty"] == 2.0 and scores["unfinished"]["above_complete"]["share"] == 0
    assert scores["other_prompt"]["mean"] == pytest.approx((63 + 16 + 126) / 3)
    assert scores["other_prompt"]["above_complete"]["share"] == pytest.approx(1 / 3)
    own = [sum(words.encode_prompt(prompt) + words.encode_answer(text)) for text in ("some", "words")]
    assert scores["sft"] == {"mean": sum(own) / 2, "std": abs(own[0] - own[1]) / 2, "count": 2}
    assert scores["base"]["count"] == 1  # the other answer is longer than max_length
    assert actual["judge"]["answers"] == 1  # one prompt
    assert actual["temperatures"] == [1.0, 0.0]
    assert actual["judge"]["same_prompt"]["share"] == float(own[1] > own[0])


def test_without_sft_stage_and_pairs_the_card_omits_their_parts(tmp_path: Path) -> None:
    actual = card_of(tmp_path, [])
    assert actual["judge"] is None and actual["calibration"] is None and actual["margin_by_length"] == []
    assert set(actual["scores"].values()) == {None}
