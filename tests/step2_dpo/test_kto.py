"""KTO: updates against plain PyTorch, and the unrelated answers that estimate its baseline."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config.stage_sections import DpoSection
from pipeline.data.encode import LabelledItem, labelled_answers
from pipeline.data.records import LabelledAnswer, Message, Preference
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from step2_dpo.kto import Example, LabelBatches, examples_of
from step2_dpo.loss import kto_baseline, kto_loss
from tests.pipeline.models.tiny import source_in, trained
from tests.step2_dpo.test_dpo import plain_logprob

SIZES = [(3, 5, True), (1, 12, True), (6, 1, True), (4, 7, True), (2, 2, False)]  # prompt, answer, label
LR, STEPS = 2e-3, 3


def items() -> list[LabelledItem]:
    source = random.Random(5)
    return [
        LabelledItem(np.array([source.randint(2, 95) for _ in range(p + a)], dtype=np.int32), p, label)
        for p, a, label in SIZES
    ]


def batches_in(folder: Path, section: DpoSection, *, packing: bool) -> LabelBatches:
    engine = build_policy(source_in(folder), trained(lr=LR))
    assert not packing or verify(engine, max_length=24)
    examples = examples_of(items(), max_length=24)
    unread = {"train": torch.zeros(5, 2), "held_out": torch.zeros(3, 2)}
    return LabelBatches(engine, section, examples, examples[:3], unread, [range(5)] * STEPS, packing, 0)


def plain_log_ratios(model: Any, reference: Any, sides: list[tuple[np.ndarray, int]]) -> Tensor:
    return torch.stack([plain_logprob(model, *side) - plain_logprob(reference, *side).detach() for side in sides])


@pytest.mark.parametrize(("packing", "budget"), [(True, 10_000), (True, 20), (False, 1)])
def test_steps_equal_plain_pytorch(folder: Path, tmp_path: Path, packing: bool, budget: int) -> None:
    """The baseline is computed over the full batch for every division into micro-batches."""
    section = DpoSection(loss="kto", beta=0.5, undesirable_weight=1.5)
    batches = batches_in(folder, section, packing=packing).read_reference(tmp_path, budget)
    model, reference = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    own = [(each.ids, each.prompt) for each in batches.train]
    unrelated = [(each.unrelated, each.prompt) for each in batches.train]
    baselines = []
    for step in range(STEPS):
        with torch.no_grad():
            baselines.append(max(0.0, plain_log_ratios(model, reference, unrelated).mean().item()))
        moved = plain_log_ratios(model, reference, own)
        losses = [
            1 - torch.sigmoid(0.5 * (r - baselines[-1]))
            if label
            else 1.5 * (1 - torch.sigmoid(0.5 * (baselines[-1] - r)))
            for r, (_, _, label) in zip(moved, SIZES, strict=True)
        ]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch = batches.step(step, budget)
        update = batches.engine.update(batch.microbatches, batches.loss, batch.count)
        desirable = moved[:4].mean().item()
        assert update.loss == pytest.approx(loss.item(), rel=1e-4)
        assert update.sums["chosen_reward"] / 5 == pytest.approx(0.5 * desirable, rel=1e-3, abs=1e-5)
        assert update.sums["baseline"] / 5 == pytest.approx(baselines[-1], rel=1e-3, abs=1e-5)
    # The update has changed the probabilities of unrelated answers, too.
    assert baselines[0] == 0.0 and baselines[-1] > 0.01
    ours = batches.engine.module.lm.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter, rtol=1e-3, atol=2e-5), name
    metrics, summary = batches.evaluation(budget)
    with torch.no_grad():
        moved = plain_log_ratios(model, reference, own[:3])
    assert metrics["eval_chosen_reward"] == pytest.approx(0.5 * moved.mean().item(), rel=1e-3, abs=1e-4)
    assert summary["eval_answers"] == 3 and metrics["eval_loss"] < 1.2


@pytest.mark.parametrize("packing", [False, True])
def test_an_empty_micro_batch_adds_nothing(folder: Path, tmp_path: Path, packing: bool) -> None:
    losses = []
    for empty in (False, True):
        batches = batches_in(folder, DpoSection(loss="kto"), packing=packing).read_reference(tmp_path, 100)
        batch = batches.step(0, 100)
        extra = [batches._collate(batches.train, torch.zeros(5), torch.zeros(()))([])] * empty
        losses.append(batches.engine.update([*batch.microbatches, *extra], batches.loss, 5).loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0] == pytest.approx(0.5)


def test_kto_by_hand() -> None:
    """Log-ratios log(3) / beta above and below the baseline give v = 3/4 and 1/4."""
    beta, lead = 0.1, np.log(3.0) / 0.1
    log_ratios = torch.tensor([2 + lead, 2 - lead, 2 + lead, 2.0])
    labels = torch.tensor([True, True, False, False])
    actual = kto_loss(log_ratios, labels, 2.0, beta=beta, undesirable_weight=2.0)
    assert actual.item() == pytest.approx(1 / 4 + 3 / 4 + 2 * 3 / 4 + 2 * 1 / 2)


def test_the_baseline_is_a_mean_that_is_not_negative() -> None:
    assert kto_baseline(torch.tensor([3.0, -1.0])).item() == 1.0
    assert kto_baseline(torch.tensor([-3.0, 1.0])).item() == 0.0


def test_unrelated_answers_belong_to_another_prompt() -> None:
    def item(prompt: list[int], answer: list[int]) -> LabelledItem:
        return LabelledItem(np.array(prompt + answer, dtype=np.int32), len(prompt), True)

    examples: list[Example] = examples_of(
        [item([1, 2], [11]), item([1, 2], [12]), item([3], [13, 14, 15])], max_length=4
    )
    assert [each.unrelated.tolist() for each in examples] == [[1, 2, 13, 14], [1, 2, 13, 14], [3, 11]]
    same = examples_of([item([1, 2], [11]), item([1, 2], [12])], max_length=4)
    assert [each.unrelated.tolist() for each in same] == [[1, 2, 12], [1, 2, 11]]
    (single,) = examples_of([item([1, 2], [11])], max_length=4)  # a single answer has no other prompt
    assert single.unrelated.tolist() == [1, 2, 11]


def test_unrelated_answers_have_the_labels_of_the_data() -> None:
    """They estimate the KL, which answers of one label would overestimate or underestimate after some steps."""
    pairs = [
        LabelledItem(np.array([i, 1000 + 2 * i + k], dtype=np.int32), 1, k == 0) for i in range(200) for k in (0, 1)
    ]
    answers = [int(each.unrelated[1]) - 1000 for each in examples_of(pairs, max_length=4)]
    assert 0.4 < np.mean([answer % 2 for answer in answers]) < 0.6  # rejected answers have odd numbers
    assert len(set(answers)) > 390  # nearly every answer is the unrelated one of one example
    assert all(answer // 2 != index // 2 for index, answer in enumerate(answers))


def test_a_pair_becomes_two_labelled_answers() -> None:
    prompt = (Message("user", "q"),)
    rated = LabelledAnswer((*prompt, Message("assistant", "x")), False, "s")
    actual = labelled_answers(
        [Preference(prompt, Message("assistant", "good"), Message("assistant", "bad"), "s"), rated]
    )
    assert [(each.messages[-1].content, each.label) for each in actual] == [
        ("good", True),
        ("bad", False),
        ("x", False),
    ]
    assert all(each.messages[:-1] == prompt for each in actual)
