"""The reward stage: updates over pairs and scores against transformers, and reported accuracies by hand."""

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine import Update
from pipeline.config.stage_sections import RewardSection
from pipeline.data.batch import PairBatch, collate_pairs, pack_pairs
from pipeline.data.encode import PairItem
from pipeline.data.microbatches import local_microbatches
from pipeline.data.records import Message, Preference
from pipeline.evaluation.pair_accuracy import Scored, accuracies
from pipeline.models.build import build_scorer
from pipeline.models.checks import verify
from pipeline.stages.data import log_undecided
from step2_reward.batches import RewardBatches
from step2_reward.train import reference_level, reference_pairs
from tests.pipeline.models.tiny import classifier, config_of, source_in, trained

SIZES = [(5, 9), (12, 4), (3, 3), (7, 10), (2, 6)]


def pairs() -> list[PairItem]:
    source = random.Random(5)

    def ids(length: int) -> np.ndarray:
        return np.array([source.randint(2, 95) for _ in range(length)], dtype=np.int32)

    return [PairItem(ids(a), ids(b), 0.5 * place, f"source-{place % 2}", 0) for place, (a, b) in enumerate(SIZES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    classifier(config_of("llama")).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def own(folder: Path) -> list[tuple[float, float]]:
    """Return the scores of both answers by transformers, one sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).double()

    def score(ids: np.ndarray) -> float:
        with torch.no_grad():
            return model(input_ids=torch.tensor(ids[None]).long()).logits.item()

    return [(score(pair.chosen), score(pair.rejected)) for pair in pairs()]


def batches_of(folder: Path, packing: bool, items: Sequence[PairItem] = (), **section: Any) -> RewardBatches:
    """Return batches with a new model."""
    engine = build_scorer(source_in(folder), trained(), pad_id=0)
    assert not packing or verify(engine, max_length=16)
    return RewardBatches(engine, RewardSection(**section), items or pairs(), (), 0, packing, 0)


def update_of(batches: RewardBatches, budget: int, *more: PairBatch) -> Update:
    """Take a step over all pairs, and over more micro-batches."""
    made, _ = batches.divide(local_microbatches, batches.pairs, budget)
    return batches.engine.update([*made, *more], batches.loss, len(batches.pairs))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_micro_batches_contain_each_pair_once(folder: Path, budget: int, packing: bool) -> None:
    batches, places = batches_of(folder, packing).divide(local_microbatches, pairs(), budget)
    assert sorted(place for where in places for place in where) == list(range(5))
    for batch, where in zip(batches, places, strict=True):
        assert len(where) == 1 or batch.input_ids.numel() <= budget
        last = [pairs()[p].chosen[-1] for p in where] + [pairs()[p].rejected[-1] for p in where]
        assert batch.input_ids.flatten()[batch.ends].tolist() == last
        assert batch.margins.tolist() == [0.5 * p for p in where]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("centering", "use_margin", "budget"), [(0.0, False, 10_000), (0.02, True, 40)])
def test_an_update_is_the_mean_over_pairs(
    folder: Path, own: list[tuple[float, float]], centering: float, use_margin: bool, budget: int, packing: bool
) -> None:
    update = update_of(batches_of(folder, packing, centering=centering, use_margin=use_margin), budget)
    expected = 0.0
    for place, (chosen, rejected) in enumerate(own):
        lead = chosen - rejected - (0.5 * place if use_margin else 0.0)
        expected += math.log1p(math.exp(-lead)) + centering * (chosen + rejected) ** 2
    assert update.loss == pytest.approx(expected / len(SIZES), rel=1e-4)
    assert update.sums["accuracy"] == sum(chosen > rejected for chosen, rejected in own)
    assert update.sums["margin"] == pytest.approx(sum(c - r for c, r in own), rel=1e-4)


def test_shared_prompts_do_not_change_the_update(folder: Path) -> None:
    made = [
        PairItem(
            np.concatenate([pair.chosen[:2], pair.chosen]), np.concatenate([pair.chosen[:2], pair.rejected]), 0, "", 2
        )
        for pair in pairs()
    ]
    done = {}
    for packing in (False, True):
        batches = batches_of(folder, packing, made)
        update, (divided, _) = update_of(batches, 40), batches.divide(local_microbatches, made, 40)
        done[packing] = (update.loss, update.grad_norm, sum(each.input_ids.numel() for each in divided))
    assert done[True][:2] == pytest.approx(done[False][:2], rel=1e-5)
    assert done[True][2] == sum(len(pair.chosen) + len(pair.rejected) - 2 for pair in made) < done[False][2]


@pytest.mark.parametrize("packing", [False, True])
def test_an_empty_batch_adds_nothing(folder: Path, packing: bool) -> None:
    single = update_of(batches_of(folder, packing), 10_000)
    nothing = (pack_pairs if packing else collate_pairs)([], 0)
    both = update_of(batches_of(folder, packing), 10_000, nothing)
    assert both.loss == pytest.approx(single.loss) and both.grad_norm == pytest.approx(single.grad_norm, rel=1e-5)
    assert both.sums == pytest.approx(single.sums)


@pytest.mark.parametrize("packing", [False, True])
def test_scores_of_pairs_are_in_order(folder: Path, own: list[tuple[float, float]], packing: bool) -> None:
    batches = batches_of(folder, packing)
    actual = batches.scores(pairs(), 40)
    for scored, pair, (chosen, rejected) in zip(actual, pairs(), own, strict=True):
        assert scored.pair.source == pair.source and len(scored.pair.chosen) == len(pair.chosen)
        assert (scored.chosen, scored.rejected) == pytest.approx((chosen, rejected), abs=3e-5)
    assert batches.scores([], 40) == []


def test_accuracies_by_hand() -> None:
    scores = [(1.0, 0.0), (0.0, 1.0), (2.0, 2.0), (3.0, 1.0), (5.0, -1.0)]  # a tie is not a success
    actual = accuracies([Scored(pair, *score) for pair, score in zip(pairs(), scores, strict=True)])
    assert actual == {
        "eval_accuracy": 3 / 5,
        "eval_accuracy_low": pytest.approx(0.230724, abs=1e-6),  # Wilson: (3 + 1.920729 -+ 2.880790) / 8.841459
        "eval_accuracy_high": pytest.approx(0.882379, abs=1e-6),
        "eval_accuracy_by_source": {"source-0": 2 / 3, "source-1": 1 / 2},
        "eval_accuracy_chosen_longer": 0.0,  # only the second pair
        "eval_accuracy_rejected_longer": 1.0,  # first, fourth and fifth; the lengths of the third are equal
        "eval_pairs": 5.0,
    }
    assert accuracies([])["eval_accuracy"] is None


def test_the_reference_level_is_the_mean_of_chosen_answers() -> None:
    chosen = [1.0, 2.0, 4.0, 0.5, 3.0]
    actual = reference_level([Scored(pair, score, 99.0) for pair, score in zip(pairs(), chosen, strict=True)])
    assert actual["reward_mean"] == pytest.approx(statistics.fmean(chosen))
    assert actual["reward_std"] == pytest.approx(statistics.pstdev(chosen))


@pytest.mark.parametrize(("count", "used"), [(1, 1), (512, 512), (513, 257), (5000, 500)])
def test_the_reference_answers_are_from_all_sources(count: int, used: int) -> None:
    """The training pairs of a second source follow all those of the first one."""
    numbered: Any = range(count)
    assert len(reference_pairs(numbered)) == used and reference_pairs(numbered)[-1] >= count - 10


def test_undecided_pairs_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = (Message("user", "?"),)
    margins = {"scored": (2.0, 0.0, -1.0, 0.0), "unscored": (0.0,)}
    sides = Message("assistant", "a"), Message("assistant", "b")
    pairs = [Preference(prompt, *sides, source, margin) for source, each in margins.items() for margin in each]
    log_undecided("reward", pairs)
    assert "2 of 5 pairs are ties, and in 1 the rejected answer is better" in capsys.readouterr().out
    log_undecided("reward", [pairs[0], pairs[-1]])
    assert capsys.readouterr().out == ""
