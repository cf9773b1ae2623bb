"""A first ratio other than 1 stops the run, and the error names the cause."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Generation
from pipeline.config.stage_sections import PpoSection
from pipeline.errors import UserError
from step3_ppo.models import Models
from step3_ppo.rollout import Rollout, collect
from step3_ppo.update import RATIO_TOLERANCE, check_first_ratio, means, minibatches, update_policy
from tests.pipeline.models.tiny import classifier, config_of, language_model
from tests.step3_ppo.example_rollouts import advantages_of, models_in, rollout_of, saved_models

PROMPTS, RESPONSES = [3, 6, 2, 5, 4], [4, 1, 6, 2, 5]


def scored(models: Models, temperature: float) -> Rollout:
    made = rollout_of(PROMPTS, RESPONSES)
    drawn = [Generation(r, [0.0] * len(r), True) for r in made.responses]
    return collect(models, made.prompts, drawn, temperature=temperature, pad_id=0, budget=30)


def first_deviation(models: Models, rollout: Rollout, temperature: float) -> float:
    """Return the value that the training loop measures: the mean |ratio - 1| of the first minibatch."""
    section = PpoSection()
    (minibatch,) = minibatches(rollout, count=1, seed=1, pad_id=0, budget=30)
    targets = advantages_of(rollout, section, kl_coef=0.1)
    update = update_policy(models.actor, minibatch, rollout, targets, section, temperature=temperature)
    return means(update, minibatch.tokens)["deviation"]


def check(models: Models, rollout: Rollout, deviation: float, temperature: float = 1.0, **keys: Any) -> None:
    keys = {"tolerance": None, **keys}
    check_first_ratio(models, rollout, deviation, temperature=temperature, pad_id=0, **keys)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_correct_rollout_passes(temperature: float, tmp_path: Path) -> None:
    saved_models(tmp_path)
    models = models_in(tmp_path)
    rollout = scored(models, temperature)
    deviation = first_deviation(models, rollout, temperature)
    assert deviation < 1e-5
    check(models, rollout, deviation, temperature)
    check(models, rollout, 0.0, temperature)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout(family: str, tmp_path: Path) -> None:
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.1} if family == "gpt2" else {"attention_dropout": 0.1}
    language_model(config_of(family, **rates)).save_pretrained(tmp_path / "actor")
    classifier(config_of(family)).save_pretrained(tmp_path / "reward")
    quiet = models_in(tmp_path)  # the engine disables dropout by default
    assert first_deviation(quiet, scored(quiet, 1.0), 1.0) < 1e-5
    models = models_in(tmp_path, dropout=0.1)
    rollout = scored(models, 1.0)
    deviation = first_deviation(models, rollout, 1.0)
    assert deviation > RATIO_TOLERANCE["fp32"]
    with pytest.raises(UserError, match="Likely cause: dropout"):
        check(models, rollout, deviation)


@pytest.mark.parametrize(("drawn_at", "trained_at"), [(1.0, 0.7), (1.0, 1.3)])
def test_temperature(drawn_at: float, trained_at: float, tmp_path: Path) -> None:
    saved_models(tmp_path)
    models = models_in(tmp_path)
    rollout = scored(models, drawn_at)
    deviation = first_deviation(models, rollout, trained_at)
    assert deviation > 0.01
    with pytest.raises(UserError, match="Likely cause: temperature"):
        check(models, rollout, deviation, trained_at)


def test_the_check_comes_before_the_step(tmp_path: Path) -> None:
    saved_models(tmp_path)
    models = models_in(tmp_path)
    rollout = scored(models, 1.0)
    (minibatch,) = minibatches(rollout, count=1, seed=1, pad_id=0, budget=30)
    targets = advantages_of(rollout, PpoSection(), kl_coef=0.1)
    before = [p.detach().clone() for p in models.actor.module.parameters()]

    def refuse(deviation: float) -> None:
        raise UserError(f"{deviation}")

    with pytest.raises(UserError):
        update_policy(models.actor, minibatch, rollout, targets, PpoSection(), temperature=0.7, check=refuse)
    assert all(torch.equal(a, b) for a, b in zip(before, models.actor.module.parameters(), strict=True))


def leaking(module: torch.nn.Module) -> Callable[[], None]:
    """Make every token attend to the full row, including padding."""
    embedding = module.get_submodule("lm.model.embed_tokens")
    handle = embedding.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    return handle.remove


def test_padding(tmp_path: Path) -> None:
    saved_models(tmp_path)
    models = models_in(tmp_path)
    leaking(models.actor.module)
    made = rollout_of(PROMPTS, RESPONSES)
    drawn = [Generation(r, [0.0] * len(r), True) for r in made.responses]
    # One sequence in each micro-batch.
    rollout = collect(models, made.prompts, drawn, temperature=1.0, pad_id=0, budget=1)
    deviation = first_deviation(models, rollout, 1.0)
    assert deviation > RATIO_TOLERANCE["fp32"]
    with pytest.raises(UserError, match="Likely cause: padding"):
        check(models, rollout, deviation)


def test_other_deviations_are_attributed_to_the_precision(tmp_path: Path) -> None:
    saved_models(tmp_path)
    models = models_in(tmp_path)
    with pytest.raises(UserError, match=r"Likely cause: dtype\. .*engine\.dtype=fp32"):
        check(models, scored(models, 1.0), 0.01)


def test_the_tolerance_depends_on_key_or_precision(tmp_path: Path) -> None:
    saved_models(tmp_path)
    models = models_in(tmp_path)
    rollout = scored(models, 1.0)
    check(models, rollout, 0.01, tolerance=0.02)
    with pytest.raises(UserError, match=r"off by 0\.03 on average \(at most 0\.02"):
        check(models, rollout, 0.03, tolerance=0.02)
    coarse = replace(models, actor=models_in_bf16(tmp_path))
    check(coarse, rollout, 0.04)
    with pytest.raises(UserError):
        check(coarse, rollout, 0.06)


def models_in_bf16(folder: Path) -> Any:
    from pipeline.models.build import build_policy
    from tests.pipeline.models.tiny import source_in, trained

    return build_policy(source_in(folder / "actor"), trained("bf16"))
