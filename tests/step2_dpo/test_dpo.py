"""DPO: updates over pairs against plain PyTorch, held-out figures, and the cached reference log-probabilities."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import Engine
from pipeline.config.stage_sections import DpoSection, LoraConfig
from pipeline.data.encode import PairItem
from pipeline.models.build import build_policy
from pipeline.models.checks import verify
from step2_dpo import batches as batches_module
from step2_dpo.batches import reference_tables
from step2_dpo.pairs import PairBatches, collate_answers, held_out_metrics
from tests.pipeline.models.tiny import source_in, trained

SIZES = [(3, 5, 9), (1, 12, 4), (6, 1, 2), (4, 7, 10), (2, 2, 6)]  # prompt, chosen answer, rejected answer
LR, STEPS = 2e-3, 3


def pairs() -> list[PairItem]:
    source = random.Random(5)

    def ids(length: int) -> list[int]:
        return [source.randint(2, 95) for _ in range(length)]

    items = []
    for prompt, chosen, rejected in ((ids(p), ids(c), ids(r)) for p, c, r in SIZES):
        rejected[0] = chosen[0]  # the answers share their first token
        sides = (np.array(prompt + answer, dtype=np.int32) for answer in (chosen, rejected))
        items.append(PairItem(*sides, 0.0, "made", len(prompt)))
    return items


def policy_in(folder: Path, *, packing: bool = True, **rest: Any) -> Engine:
    engine = build_policy(source_in(folder), trained(lr=LR, **rest))
    assert not packing or verify(engine, max_length=24)
    return engine


def batches_of(
    engine: Engine, items: Sequence[PairItem], section: DpoSection | None = None, *, packing: bool = True
) -> PairBatches:
    """Return batches whose steps contain all items, with zeros for the reference."""
    unread, schedule = dict.fromkeys(("train", "held_out"), torch.zeros(len(items), 2)), [range(len(items))] * STEPS
    return PairBatches(engine, section or DpoSection(), items, items, unread, schedule, packing, 0)


def plain_logprob(model: Any, ids: np.ndarray, prompt: int) -> Tensor:
    """Return the log-probability of an answer, from transformers' logits of one sequence."""
    row = torch.tensor(ids[None]).long()
    logits = model(input_ids=row).logits[0, :-1].float().log_softmax(-1)
    return logits.gather(1, row[0, 1:, None])[prompt - 1 :].sum()


def plain_logprobs(model: Any, items: Sequence[PairItem]) -> Tensor:
    """Return (N, 2), the log-probabilities of both answers."""
    pairs = [[plain_logprob(model, side, i.prompt) for side in (i.chosen, i.rejected)] for i in items]
    return torch.stack([torch.stack(pair) for pair in pairs])


LENGTHS = torch.tensor([[chosen, rejected] for _, chosen, rejected in SIZES])


def plain_scores(loss: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return (N, 2), the scores whose difference the loss increases."""
    if loss == "simpo":
        return logprobs / LENGTHS
    if loss == "orpo":
        likelihood = (logprobs / LENGTHS).exp()
        return torch.log(likelihood / (1 - likelihood))
    return (logprobs - reference) / (LENGTHS if loss == "length_normalized" else 1)


def plain_steps(folder: Path, dpo: DpoSection) -> tuple[list[dict[str, float]], Any]:
    """Train DPO with plain PyTorch and transformers. Return the metrics of each step and the final model."""
    model, items = AutoModelForCausalLM.from_pretrained(folder), pairs()
    reference = plain_logprobs(model, items).detach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    message = []
    for _ in range(STEPS):
        logprobs = plain_logprobs(model, items)
        moved = plain_scores(dpo.loss, logprobs, reference)
        lead = moved[:, 0] - moved[:, 1]
        probability = torch.sigmoid(dpo.beta * lead)
        if dpo.loss == "ipo":
            losses = (lead - 1 / (2 * dpo.beta)) ** 2
        elif dpo.loss == "robust":
            share = dpo.label_smoothing
            losses = (share * (1 - probability).log() - (1 - share) * probability.log()) / (1 - 2 * share)
        elif dpo.loss == "apo_zero":
            good, bad = torch.sigmoid(dpo.beta * moved).unbind(1)
            losses = 1 - good + bad
        elif dpo.loss == "simpo":
            losses = torch.log1p(torch.exp(dpo.margin - dpo.beta * lead))
        elif dpo.loss == "orpo":
            losses = dpo.beta * torch.log1p(torch.exp(-lead)) - logprobs[:, 0] / LENGTHS[:, 0]
        else:
            losses = -(1 - dpo.label_smoothing) * probability.log() - dpo.label_smoothing * (1 - probability).log()
        loss = (losses - dpo.sft_coef * logprobs[:, 0] / LENGTHS[:, 0]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        message.append(
            {
                "loss": loss.item(),
                "accuracy": (lead > 0).float().mean().item(),
                "margin": dpo.beta * lead.mean().item(),
                "chosen_reward": dpo.beta * moved[:, 0].mean().item(),
                "rejected_reward": dpo.beta * moved[:, 1].mean().item(),
                "chosen_logprob": logprobs[:, 0].mean().item(),
                "rejected_logprob": logprobs[:, 1].mean().item(),
            }
        )
        if dpo.loss not in ("simpo", "orpo"):
            message[-1]["drift"] = (logprobs - reference).abs().mean().item()
    return message, model


@pytest.mark.parametrize(
    ("keys", "packing", "budget"),
    [
        ({}, True, 10_000),
        ({"beta": 0.5, "label_smoothing": 0.1, "sft_coef": 0.7}, True, 40),
        ({"loss": "robust", "beta": 0.5, "label_smoothing": 0.2}, True, 40),
        ({"loss": "apo_zero", "beta": 0.5, "sft_coef": 0.3}, False, 40),
        ({"loss": "ipo", "beta": 0.2}, False, 1),
        ({"loss": "length_normalized", "beta": 1.0, "label_smoothing": 0.1}, True, 40),
        ({"loss": "simpo", "beta": 2.0, "margin": 1.0}, True, 40),
        ({"loss": "orpo", "beta": 0.3}, False, 1),
    ],
)
def test_steps_equal_plain_pytorch(
    folder: Path, tmp_path: Path, keys: dict[str, Any], packing: bool, budget: int
) -> None:
    dpo, items = DpoSection(**keys), pairs()
    expected, model = plain_steps(folder, dpo)
    engine = policy_in(folder, packing=packing)
    known = batches_of(engine, items, dpo, packing=packing)
    if dpo.has_reference:
        known = known.read_reference(tmp_path, budget)
    for step, figures in enumerate(expected):
        batch = known.step(step, budget)
        assert sum(len(each.lengths) for each in batch.microbatches) == 2 * len(items) == 2 * batch.count
        update = engine.update(batch.microbatches, known.loss, batch.count)
        actual = {"loss": update.loss} | {name: total / len(items) for name, total in update.sums.items()}
        assert actual == pytest.approx(figures, rel=1e-4, abs=1e-5)
    state = engine.module.lm.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.allclose(state[name], parameter, rtol=1e-3, atol=2e-5), name
    last = known.evaluate(budget)
    after = plain_scores(dpo.loss, plain_logprobs(model, items).detach(), known.reference["train"])
    lead = after[:, 0] - after[:, 1]
    assert last["eval_accuracy"] == (lead > 0).double().mean().item()
    assert last["eval_margin"] == pytest.approx(dpo.beta * lead.mean().item(), rel=1e-3)
    rewards = [last["eval_chosen_reward"], last["eval_rejected_reward"]]
    assert rewards == pytest.approx((dpo.beta * after.mean(0)).tolist(), rel=1e-3, abs=1e-4)
    assert dpo.sft_coef or last["eval_loss"] < expected[0]["loss"]


def test_held_out_shares_use_the_gain_over_the_reference() -> None:
    """The second pair, the only one with a longer chosen answer, and the last pair lose against the reference."""
    before = torch.tensor([[-9.0, -5.0], [-2.0, -7.0], [-4.0, -4.0], [-1.0, -1.0], [0.0, 0.0]])
    after = torch.tensor([[-8.0, -5.0], [-2.0, -6.0], [-3.0, -4.0], [-1.0, -3.0], [-2.0, -1.0]])
    _, shares = held_out_metrics(DpoSection(), pairs(), after, before)
    assert (shares["eval_accuracy"], shares["eval_pairs"]) == (3 / 5, 5)
    assert shares["eval_accuracy_chosen_longer"] == 0.0 and shares["eval_accuracy_rejected_longer"] == 3 / 4
    assert shares["eval_accuracy_by_source"] == {"made": 3 / 5}


@pytest.mark.parametrize("packing", [False, True])
def test_only_answers_are_scored_and_share_their_prompt(packing: bool) -> None:
    items, reference = pairs(), torch.arange(10.0).view(5, 2)
    batch = collate_answers(items, reference, 0, packing=packing)
    answers = [i.chosen[i.prompt :] for i in items] + [i.rejected[i.prompt :] for i in items]
    assert batch.input_ids.flatten()[batch.scored].tolist() == np.concatenate(answers).tolist()
    assert batch.lengths.tolist() == [len(answer) for answer in answers] and batch.longest == 12
    assert batch.reference.tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    if packing:
        # The last token of the prompt is repeated.
        assert batch.input_ids.numel() == sum(p + 1 + c + r for p, c, r in SIZES)


@pytest.mark.parametrize("packing", [False, True])
def test_an_empty_batch_adds_nothing(folder: Path, packing: bool) -> None:
    results = []
    for empty in (False, True):
        engine = policy_in(folder, packing=packing)
        known = batches_of(engine, pairs(), packing=packing)
        extra = [collate_answers([], torch.zeros(0, 2), 0, packing=packing)] * empty
        update = engine.update([*known.step(0, 10_000).microbatches, *extra], known.loss, 5)
        results.append({"loss": update.loss, "norm": update.grad_norm, **update.sums})
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_the_reference_is_cached_and_is_the_model_without_adapters(folder: Path, tmp_path: Path) -> None:
    """The reference is computed once, not again with a trained model. New held-out pairs are computed again."""
    items = pairs()
    engine = policy_in(folder, lora=LoraConfig(rank=4))
    batches = batches_of(engine, items, DpoSection(beta=1.0))
    computed: list[int] = []

    def read(some: Sequence[PairItem]) -> Tensor:
        computed.append(len(some))
        return batches.logprobs(some, 64)

    def tables(**sets: Sequence[PairItem]) -> dict[str, Tensor]:
        return reference_tables(tmp_path, sets, read)

    known = tables(train=items, held_out=items[:2])
    with torch.no_grad():
        expected = plain_logprobs(AutoModelForCausalLM.from_pretrained(folder), items)
    assert torch.allclose(known["train"], expected, rtol=1e-5, atol=1e-4)
    batches = replace(batches, reference=known)
    for step in range(2):
        engine.update(batches.step(step, 64).microbatches, batches.loss, 5)
    again = tables(train=items, held_out=items[:2])
    assert all((again[name] == known[name]).all() for name in known) and computed == [5, 2]
    fewer = tables(train=items, held_out=items[:1])
    assert (fewer["train"] == known["train"]).all() and computed == [5, 2, 1]
    (tmp_path / "reference.safetensors").write_bytes(b"cut off")
    assert tables(held_out=items[:1])["held_out"].shape == (1, 2)
    assert computed == [5, 2, 1, 1]


def test_an_interrupted_reference_pass_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a stop in the third of three parts, the first two are not computed again. The result is the same."""
    items, numbers = pairs(), torch.arange(10.0).view(5, 2)
    computed: list[int] = []

    def read(some: Sequence[PairItem], until: int = 99) -> Tensor:
        computed.append(len(some))
        if len(computed) > until:
            raise KeyboardInterrupt
        first = items.index(some[0])
        return numbers[first : first + len(some)]

    for name, value in {"CHUNK": 2, "SAVE_SECONDS": 0.0}.items():
        monkeypatch.setattr(batches_module, name, value)
    with pytest.raises(KeyboardInterrupt):
        reference_tables(tmp_path, {"train": items}, partial(read, until=2))
    assert "scores 5 examples" in (printed := capsys.readouterr().out) and "has scored 4 of 5 examples" in printed
    known = reference_tables(tmp_path, {"train": items}, read)
    assert computed == [2, 2, 1, 1] and known["train"].tolist() == numbers.tolist()
    assert "scores 1 examples" in capsys.readouterr().out
