"""Advantages and updates on a small random rollout, against loops by hand in float64."""

import dataclasses
import math
import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.parallel import dist
from pipeline.config.stage_sections import PpoSection
from pipeline.data.batch import TokenBatch
from step3_ppo.rollout import Rollout
from step3_ppo.setup import reward_shaping
from step3_ppo.update import means, minibatches, update_policy
from tests.step3_ppo.example_rollouts import Table, advantages_of, close, models_in, rollout_of, saved_models
from tests.step3_ppo.test_advantages import gae_by_hand, rewards_by_hand
from tests.step3_ppo.test_loss import policy_by_hand

PROMPTS, RESPONSES = [3, 6, 2, 5, 4], [4, 1, 6, 2, 5]


def rows_of(values: torch.Tensor, rollout: Rollout) -> Table:
    """Return (B, R) as ragged lists of float64."""
    return [row[: len(r)] for row, r in zip(values.double().tolist(), rollout.responses, strict=True)]


def earned_by_hand(rollout: Rollout, penalty: float, clip: float | None, *, token: float = 0.0) -> list[float]:
    results = []
    drawn = zip(rollout.scores.tolist(), rollout.finished.tolist(), rollout.responses, strict=True)
    for score, finished, answer in drawn:
        held = score if clip is None else max(-clip, min(clip, score))
        held -= token * max(0, len(answer) - 2)
        results.append(held if finished else held - penalty)
    return results


def test_targets() -> None:
    rollout = rollout_of(PROMPTS, RESPONSES)
    clips: dict[str, float] = {"missing_end_penalty": 0.7, "score_clip": 1.1, "length_penalty": 0.25, "length_free": 2}
    section = PpoSection(gamma=0.98, lam=0.9, whiten_advantages=False, **clips)
    actual = advantages_of(rollout, section, kl_coef=0.13)
    ours, theirs = rows_of(rollout.logprobs, rollout), rows_of(rollout.reference, rollout)
    kl = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(ours, theirs, strict=True)]
    rewards = rewards_by_hand(earned_by_hand(rollout, 0.7, 1.1, token=0.25), kl, 0.13)
    advantages, returns = gae_by_hand(rewards, rows_of(rollout.values, rollout), 0.98, 0.9)
    close(actual.rewards.cpu(), rewards)
    close(actual.returns.cpu(), returns)
    close(actual.advantages.cpu(), advantages)


@pytest.mark.parametrize(
    ("advantage", "kl_in", "divide"),
    [("rloo", None, True), ("grpo", None, True), ("rloo", "loss", True), ("grpo", "reward", True),
     ("grpo", None, False)],
)  # fmt: skip
def test_targets_without_a_critic(advantage: str, kl_in: str | None, divide: bool) -> None:
    rollout = dataclasses.replace(rollout_of([3, 3, 3, 5, 5, 5], [4, 1, 6, 2, 3, 5]), values=None)
    section = PpoSection(advantage=advantage, samples=3, missing_end_penalty=0.7, kl_in=kl_in, divide_by_std=divide)
    actual = advantages_of(rollout, section, kl_coef=0.13)
    ours, theirs = rows_of(rollout.logprobs, rollout), rows_of(rollout.reference, rollout)
    earned = earned_by_hand(rollout, 0.7, None)
    in_reward = kl_in == "reward" or (kl_in is None and advantage == "rloo")
    if in_reward:  # the whole answer's KL is part of what it earned
        earned = [e - 0.13 * (math.fsum(a) - math.fsum(b)) for e, a, b in zip(earned, ours, theirs, strict=True)]
    above: list[float] = []
    for group in (earned[:3], earned[3:]):
        if advantage == "rloo":
            above += [each - (sum(group) - each) / 2 for each in group]
        else:
            spread = statistics.stdev(group) if divide else 1.0
            above += [(each - statistics.fmean(group)) / spread for each in group]
    close(actual.advantages, [[a] * len(row) for a, row in zip(above, rollout.responses, strict=True)])
    assert actual.rewards.sum(1).tolist() == pytest.approx(earned, abs=1e-5)
    assert actual.returns is None
    assert (reward_shaping(section).kl_estimator is not None) == in_reward  # otherwise the KL is in the loss


def test_reinforce_whitens_the_rewards_to_go() -> None:
    rollout = dataclasses.replace(rollout_of(PROMPTS, RESPONSES), values=None)
    section = PpoSection(advantage="reinforce", gamma=0.9, lam=0.5, kl_estimator="k2")  # only a critic uses lam
    actual = advantages_of(rollout, section, kl_coef=0.13)
    ours, theirs = rows_of(rollout.logprobs, rollout), rows_of(rollout.reference, rollout)
    kl = [[0.5 * (a - b) ** 2 for a, b in zip(x, y, strict=True)] for x, y in zip(ours, theirs, strict=True)]
    rewards = rewards_by_hand(earned_by_hand(rollout, 1.0, None), kl, 0.13)
    to_come = [[sum(0.9 ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))] for row in rewards]
    flat = [each for row in to_come for each in row]
    mean, spread = statistics.fmean(flat), statistics.pstdev(flat)
    close(actual.advantages, [[(each - mean) / spread for each in row] for row in to_come])
    assert actual.returns is None and actual.uniform_prompts is None


def test_with_a_critic_the_kl_may_be_in_the_loss() -> None:
    """Then returns and advantages do not contain the KL, and the policy loss contains all of it."""
    rollout, plain = rollout_of(PROMPTS, RESPONSES), PpoSection()
    actual = advantages_of(rollout, PpoSection(kl_in="loss"), kl_coef=0.13)
    without = advantages_of(rollout, plain, kl_coef=0.0)
    assert torch.equal(actual.advantages, without.advantages) and torch.equal(actual.returns, without.returns)
    assert not torch.equal(actual.advantages, advantages_of(rollout, plain, kl_coef=0.13).advantages)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_minibatches_contain_every_sequence_once(parts: int) -> None:
    rollout = rollout_of(PROMPTS, RESPONSES)
    seen: dict[int, list[list[int]]] = {}
    for seed in (1, 2):
        made = minibatches(rollout, count=parts, seed=seed, pad_id=0, budget=18)
        seen[seed] = [sorted(place for each in m.batches for place in each.indices) for m in made]
        assert len(made) == parts
        assert sorted(place for places in seen[seed] for place in places) == list(range(5))
        assert max(map(len, seen[seed])) - min(map(len, seen[seed])) <= 1
        for minibatch, places in zip(made, seen[seed], strict=True):
            assert minibatch.tokens == sum(RESPONSES[place] for place in places)
            assert minibatch.tokens == sum(len(each.scored) for each in minibatch.batches)
    assert (seen[1] == seen[2]) == (parts == 1)
    again = minibatches(rollout, count=parts, seed=2, pad_id=0, budget=18)
    assert [[b.indices for b in m.batches] for m in again] == [[b.indices for b in m.batches] for m in made]


def test_minibatches_exclude_masked_answers() -> None:
    rollout = rollout_of(PROMPTS, RESPONSES)  # every other answer is finished
    made = minibatches(rollout, count=2, seed=1, pad_id=0, budget=18, only_finished=True)
    assert sorted(i for minibatch in made for batch in minibatch.batches for i in batch.indices) == [0, 2, 4]
    assert sum(minibatch.tokens for minibatch in made) == 4 + 6 + 5
    assert sum(minibatch.sequences for minibatch in made) == 3
    rollout.finished.fill_(False)
    assert minibatches(rollout, count=2, seed=1, pad_id=0, budget=18, only_finished=True) == []
    rollout.finished[4] = True
    (single,) = minibatches(rollout, count=2, seed=1, pad_id=0, budget=18, only_finished=True)
    assert (single.tokens, single.sequences) == (5, 1)
    earned = reward_shaping(PpoSection(unfinished="mask"))
    assert earned.missing_end_penalty == 0.0


@pytest.mark.parametrize("budget", [18, 1000])
def test_one_update_with_sequence_ratios(budget: int, tmp_path: Path) -> None:
    """The loss and its KL are means over the answers for all micro-batches and lengths."""
    saved_models(tmp_path)
    models, rollout = models_in(tmp_path), rollout_of(PROMPTS, RESPONSES)
    section = PpoSection(ratio="sequence", clip=0.1, clip_high=0.2, dual_clip=None, importance_cap=1.5)
    section = section.model_copy(update={"importance_weights": "sequence"})
    targets = advantages_of(rollout, section, kl_coef=0.0)
    answers = [0.7, -1.2, 0.4, -0.3, 1.1]  # one advantage for each answer
    targets.advantages.copy_(padded([[a] * n for a, n in zip(answers, RESPONSES, strict=True)]))
    new, _, _ = own_policy(tmp_path, rollout, 1.0)
    shift = [0.05, -0.3, 0.15, 0.02, -0.4]
    rollout.logprobs.copy_(padded([[x.item() - d for x in row] for row, d in zip(split(new), shift, strict=True)]))
    weight = [1.2, 1.9, 0.8, 1.0, 1.4]  # the second weight is capped at 1.5
    own = rows_of(rollout.logprobs, rollout)
    rollout.generator.copy_(
        padded([[x - math.log(w) / len(row) for x in row] for row, w in zip(own, weight, strict=True)])
    )
    losses = []
    reference = rows_of(rollout.reference, rollout)
    for advantage, moved, w, a, b in zip(answers, shift, weight, split(new), reference, strict=True):
        ratio = math.exp(moved)
        held = min(max(ratio, 0.9), 1.2)
        kl = statistics.fmean(math.exp(y - x.item()) - 1 - (y - x.item()) for x, y in zip(a, b, strict=True))
        losses.append(min(w, 1.5) * max(-advantage * ratio, -advantage * held) + 0.3 * kl)
    (minibatch,) = minibatches(rollout, count=1, seed=1, pad_id=0, budget=budget)
    update = update_policy(models.actor, minibatch, rollout, targets, section, temperature=1.0, kl_coef=0.3)
    assert update.loss == pytest.approx(math.fsum(losses) / 5, rel=1e-3)


def own_policy(folder: Path, rollout: Rollout, temperature: float) -> tuple[list[float], list[float], torch.nn.Module]:
    """Return log-probabilities and entropies of all response tokens by transformers in float64, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder / "actor").double()
    logprobs, entropies = [], []
    for prompt, response in zip(rollout.prompts, rollout.responses, strict=True):
        logs = torch.log_softmax(model(input_ids=torch.tensor([prompt + response])).logits[0] / temperature, -1)
        for t, token in enumerate(response, start=len(prompt) - 1):
            logprobs.append(logs[t, token])
            entropies.append(-(logs[t].exp() * logs[t]).sum())
    return logprobs, entropies, model


@pytest.mark.parametrize("loss", ["clip", "cispo"])
def test_one_update_of_the_policy(loss: str, tmp_path: Path) -> None:
    saved_models(tmp_path)
    models, rollout = models_in(tmp_path), rollout_of(PROMPTS, RESPONSES)
    section = PpoSection(loss=loss, entropy_coef=0.05, clip=0.2, clip_high=0.1, dual_clip=1.3)
    targets = advantages_of(rollout, section, kl_coef=0.1)
    new, entropies, model = own_policy(tmp_path, rollout, 0.8)
    # Old log-probabilities are close to the new ones, so that some tokens are clipped and some are not.
    shift = iter(torch.randn(len(new), generator=torch.Generator().manual_seed(1)).mul(0.3).tolist())
    old = [[x.item() + next(shift) for x in part] for part in split(new)]
    rollout.logprobs.copy_(padded(old))
    advantages = [a for row in rows_of(targets.advantages, rollout) for a in row]
    flat = [x for row in old for x in row]
    expected, clipped, kl, ratios = policy_by_hand([x.item() for x in new], flat, advantages, 0.2, 1.3, high=0.1)
    weights = [min(max(math.exp(a.item() - b), 0.8), 1.1) for a, b in zip(new, flat, strict=True)]
    weighted = [-w * a * logprob for w, a, logprob in zip(weights, advantages, new, strict=True)]
    if loss == "cispo":
        expected, clipped = math.fsum(each.item() for each in weighted), sum(w in (0.8, 1.1) for w in weights)
    bonus = math.fsum(e.item() for e in entropies)
    (minibatch,) = minibatches(rollout, count=1, seed=1, pad_id=0, budget=18)
    assert len(minibatch.batches) > 1
    update = update_policy(models.actor, minibatch, rollout, targets, section, temperature=0.8)
    count = sum(RESPONSES)
    assert update.loss == pytest.approx((expected - 0.05 * bonus) / count, rel=1e-3)
    figures = means(update, minibatch.tokens)
    assert figures["clip_fraction"] == clipped / count and 0 < clipped < count
    assert figures["approx_kl"] == pytest.approx(kl / count, rel=1e-3)
    assert figures["ratio"] == pytest.approx(ratios / count, rel=1e-4)
    assert figures["entropy"] == pytest.approx(bonus / count, rel=1e-4)
    deviations = [abs(math.exp(a.item() - b) - 1) for a, b in zip(new, flat, strict=True)]
    assert figures["deviation"] == pytest.approx(math.fsum(deviations) / count, rel=1e-3)
    assert update.maxima["largest"] == pytest.approx(max(deviations), rel=1e-3)
    # The gradient is -A r of the unclipped tokens (CISPO: -A w of all) minus that of the entropy, by transformers.
    terms = -0.05 * sum(entropies) + (sum(weighted) if loss == "cispo" else 0.0)
    for logprob, before, advantage in zip(new, flat, advantages, strict=True):
        ratio = (logprob - before).exp()
        held = (advantage > 0 and ratio > 1.2) or (advantage < 0 and (ratio < 0.8 or ratio > 1.3))
        if not held and loss == "clip":
            terms = terms - advantage * ratio
    (terms / count).backward()
    norm = math.sqrt(math.fsum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    assert update.grad_norm == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("estimator", [None, "k2", "k3_weighted"])
def test_the_kl_in_the_loss_has_its_gradient(estimator: str | None, tmp_path: Path) -> None:
    saved_models(tmp_path)
    models, rollout = models_in(tmp_path), rollout_of(PROMPTS, RESPONSES)
    section = PpoSection(clip=10.0, dual_clip=None, kl_estimator=estimator, kl_in="loss")
    targets = advantages_of(rollout, section, kl_coef=0.0)
    targets.advantages.zero_()
    new, _, model = own_policy(tmp_path, rollout, 1.0)
    reference = [x for row in rows_of(rollout.reference, rollout) for x in row]
    both = list(zip(new, reference, strict=True))
    old = [x for row in rows_of(rollout.logprobs, rollout) for x in row]
    terms = sum((a - b) ** 2 / 2 if estimator == "k2" else math.exp(b) / a.exp() - 1 - (b - a) for a, b in both)
    if estimator == "k3_weighted":
        k3 = [math.exp(b) / a.exp() - 1 - (b - a) for a, b in both]
        terms = sum((a - o).exp() * k for a, o, k in zip(new, old, k3, strict=True))
    (terms * 0.3 / sum(RESPONSES)).backward()
    norm = math.sqrt(math.fsum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    (minibatch,) = minibatches(rollout, count=1, seed=1, pad_id=0, budget=18)
    update = update_policy(models.actor, minibatch, rollout, targets, section, temperature=1.0, kl_coef=0.3)
    assert update.loss == pytest.approx(0.3 * terms.item() / sum(RESPONSES), rel=1e-3)
    assert means(update, minibatch.tokens)["kl_loss"] == pytest.approx(terms.item() / sum(RESPONSES), rel=1e-3)
    assert update.grad_norm == pytest.approx(norm, rel=1e-3)


def split(flat: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    taken = iter(flat)
    return [[next(taken) for _ in range(n)] for n in RESPONSES]


def padded(table: Table) -> torch.Tensor:
    return torch.tensor([[*row, *[0.0] * (max(RESPONSES) - len(row))] for row in table])


def test_the_mix_of_conversations_adds_its_mean_loss(tmp_path: Path) -> None:
    saved_models(tmp_path)
    rollout, section = rollout_of(PROMPTS, RESPONSES), PpoSection(ptx_coef=0.3)
    targets = advantages_of(rollout, section, kl_coef=0.1)
    (minibatch,) = minibatches(rollout, count=1, seed=1, pad_id=0, budget=64)
    ids = torch.tensor([[7, 9, 11, 13, 15], [8, 10, 12, 0, 0]])
    counts = torch.tensor([[False, False, True, True, True], [False, True, True, False, False]])
    mixed = TokenBatch(ids, torch.tensor([2, 3, 4, 6, 7])).to(dist.world().device)
    logs = torch.log_softmax(AutoModelForCausalLM.from_pretrained(tmp_path / "actor")(input_ids=ids).logits, -1)
    nats = [-logs[row, t - 1, ids[row, t]].item() for row, t in counts.nonzero().tolist()]
    plain = update_policy(models_in(tmp_path).actor, minibatch, rollout, targets, section, temperature=1.0)
    minibatch = dataclasses.replace(minibatch, ptx=([mixed], len(nats)))
    update = update_policy(models_in(tmp_path).actor, minibatch, rollout, targets, section, temperature=1.0)
    mean = math.fsum(nats) / len(nats)
    assert update.loss == pytest.approx(plain.loss + 0.3 * mean, rel=1e-4)
    assert means(update, minibatch.tokens)["ptx_loss"] == pytest.approx(mean, rel=1e-5)
