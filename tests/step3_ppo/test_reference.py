"""Without a KL coefficient there is no reference model. Only its metrics are missing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from step3_ppo.log import rollout_metrics
from tests.step3_ppo.example_rollouts import learn
from tests.step3_ppo.test_stage import ppo_of, weights

WAYS: dict[str, dict[str, Any]] = {
    "gae": {},
    "grpo": {"advantage": "grpo", "batch_size": 3, "samples": 2},
    "adapters": {"lora": {"rank": 2}},
}


def one_step(folder: Path, **keys: Any) -> tuple[set[str], dict[str, float], list[torch.Tensor]]:
    """Return the engines, the metrics of a step, and the actor's parameters after it."""
    ppo, stage = ppo_of(folder, kl_coef=0.0, guard="off", **keys)
    rollout = ppo.collect(1, stage)
    targets = ppo.compute_advantages(rollout)
    learned = learn(ppo, 1, rollout, targets, stage.budget)
    return set(ppo.models.engines), rollout_metrics(rollout, targets) | learned, weights(ppo.models.actor)


@pytest.mark.parametrize("way", WAYS)
def test_without_kl_coefficient_training_needs_no_reference(way: str, run_folder: Path) -> None:
    asked, watched, with_it = one_step(run_folder, reference=True, **WAYS[way])
    there, figures, without = one_step(run_folder, **WAYS[way])
    assert "reference" not in there and asked - there == (set() if way == "adapters" else {"reference"})
    assert watched.keys() - figures.keys() == {"kl", "kl_k3"}
    assert figures == {name: watched[name] for name in figures}
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_the_reference_of_adapters_is_the_base_model(run_folder: Path) -> None:
    for kl_coef in (0.05, 0.0):
        models = ppo_of(run_folder, kl_coef=kl_coef, guard="off", lora={"rank": 2})[0].models
        assert models.reference is (models.actor if kl_coef else None)
