"""A first ratio other than 1 stops the run before the parameters change."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Generation
from pipeline.config.stage_sections import PpoSection
from pipeline.errors import UserError
from step3_ppo.models import Models
from step3_ppo.rollout import Rollout, collect
from step3_ppo.update import check_first_ratio, means, minibatches, update_policy
from tests.pipeline.models.tiny import classifier, config_of, language_model
from tests.step3_ppo.example_rollouts import advantages_of, models_in, rollout_of, saved_models

PROMPTS, RESPONSES = [3, 6, 2, 5, 4], [4, 1, 6, 2, 5]
check = partial(check_first_ratio, dtype="fp32", tolerance=None)


def scored(models: Models, temperature: float = 1.0, budget: int = 30) -> Rollout:
    made = rollout_of(PROMPTS, RESPONSES)
    drawn = [Generation(r, [0.0] * len(r), True) for r in made.responses]
    return collect(models, made.prompts, drawn, temperature=temperature, pad_id=0, budget=budget)


def first_deviation(models: Models, rollout: Rollout, temperature: float = 1.0, **keys: Any) -> float:
    """Return the value that the training loop measures: the mean |ratio - 1| of the first minibatch."""
    section = PpoSection()
    (minibatch,) = minibatches(rollout, count=1, seed=1, pad_id=0, budget=30)
    targets = advantages_of(rollout, section, kl_coef=0.1)
    update = update_policy(models.actor, minibatch, rollout, targets, section, temperature=temperature, **keys)
    return means(update, minibatch.tokens)["deviation"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout(family: str, tmp_path: Path) -> None:
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.1} if family == "gpt2" else {"attention_dropout": 0.1}
    language_model(config_of(family, **rates)).save_pretrained(tmp_path / "actor")
    classifier(config_of(family)).save_pretrained(tmp_path / "reward")
    quiet = models_in(tmp_path)  # the engine disables dropout by default
    assert first_deviation(quiet, scored(quiet)) < 1e-5
    models = models_in(tmp_path, dropout=0.1)
    with pytest.raises(UserError, match="dropout is active in the actor's forward"):
        first_deviation(models, scored(models), check=check)


def test_padding_that_changes_other_tokens(tmp_path: Path) -> None:
    saved_models(tmp_path)
    models = models_in(tmp_path)
    embedding = models.actor.module.get_submodule("lm.model.embed_tokens")
    embedding.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    rollout = scored(models, budget=1)  # one sequence in each micro-batch
    with pytest.raises(UserError, match="depend on the padding next to it"):
        first_deviation(models, rollout, check=check)


def test_the_check_comes_before_the_step(tmp_path: Path) -> None:
    saved_models(tmp_path)
    models = models_in(tmp_path)
    rollout = scored(models)
    before = [p.detach().clone() for p in models.actor.module.parameters()]
    with pytest.raises(UserError, match="the update would be wrong"):
        first_deviation(models, rollout, temperature=0.7, check=check)
    assert all(torch.equal(a, b) for a, b in zip(before, models.actor.module.parameters(), strict=True))


def test_the_tolerance_depends_on_key_or_precision() -> None:
    check(0.01, tolerance=0.02)
    with pytest.raises(UserError, match=r"off by 0\.03 on average \(at most 0\.02"):
        check(0.03, tolerance=0.02)
    check(0.04, dtype="bf16")
    with pytest.raises(UserError):
        check(0.06, dtype="bf16")
    with pytest.raises(UserError, match=r"at most 0\.0001 is rounding"):
        check(0.01)
