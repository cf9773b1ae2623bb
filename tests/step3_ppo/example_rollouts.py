"""Random rollouts: ragged tables as float64 lists for computations by hand, the same as tensors, and tiny models."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.parallel import dist
from pipeline.config.stage_sections import LoraConfig, PpoSection
from pipeline.models.build import build_policy, build_scorer
from pipeline.models.checks import verify
from step3_ppo.advantages import Advantages, compute_advantages
from step3_ppo.log import UpdateMetrics
from step3_ppo.models import Models
from step3_ppo.rollout import Rollout
from step3_ppo.setup import Ppo, advantage_estimator, reward_shaping
from tests.pipeline.models.tiny import classifier, config_of, frozen, language_model, source_in, trained

Table = list[list[float]]


def lengths_of(rows: int, longest: int, seed: int) -> list[int]:
    """Return random lengths from 1 to `longest`. One row has the length `longest`."""
    source = random.Random(seed)
    return [longest] + [source.randint(1, longest) for _ in range(rows - 1)]


def table(lengths: list[int], seed: int, *, scale: float = 1.0, shift: float = 0.0) -> Table:
    """Return a list of random numbers for each row, of its length."""
    source = random.Random(seed)
    return [[source.gauss(shift, scale) for _ in range(length)] for length in lengths]


def tensor(rows: Table, *, junk: float = 7.5) -> Tensor:
    """Return (B, R) fp32 with the value `junk` after the end of each row. No code may read it."""
    widest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[junk] * (widest - len(row))] for row in rows])


def mask_of(lengths: list[int]) -> Tensor:
    """Return (B, R) bool, True up to each length."""
    return torch.tensor([[position < length for position in range(max(lengths))] for length in lengths])


def close(actual: Tensor, wanted: Table, *, tolerance: float = 2e-5) -> None:
    """Assert that the rows are equal, and that the values after their ends are zero."""
    for place, row in enumerate(wanted):
        for t in range(actual.shape[1]):
            value, expected = actual[place, t].item(), row[t] if t < len(row) else 0.0
            where = f"row {place}, token {t}: {value}, not {expected}"
            assert abs(value - expected) <= tolerance * max(1.0, abs(expected)), where


def rollout_of(prompt_lengths: list[int], response_lengths: list[int], seed: int = 1) -> Rollout:
    """Return a rollout of random tokens and numbers. Every second answer has an end token."""
    source = random.Random(seed)
    prompts = [[source.randint(2, 95) for _ in range(n)] for n in prompt_lengths]
    responses = [[source.randint(2, 95) for _ in range(n)] for n in response_lengths]
    tables = [tensor(table(response_lengths, seed + k, scale=0.5, shift=-2), junk=0.0) for k in range(4)]
    device = dist.world().device
    return Rollout(
        prompts=prompts,
        responses=responses,
        finished=torch.tensor([place % 2 == 0 for place in range(len(prompts))], device=device),
        response_mask=mask_of(response_lengths).to(device),
        scores=torch.tensor([source.gauss(0, 2) for _ in prompts], device=device),
        logprobs=tables[0].to(device),
        reference=tables[1].to(device),
        values=tables[2].to(device),
        generator=tables[3].to(device),
    )


def saved_models(folder: Path, family: str = "llama") -> None:
    """Save an actor and a reward model of one family in `folder`/actor and `folder`/reward."""
    language_model(config_of(family), seed=1).save_pretrained(folder / "actor")
    classifier(config_of(family), seed=2).save_pretrained(folder / "reward")


def models_in(
    folder: Path, *, zero_stage: int = 0, lora: LoraConfig | None = None, packing: bool = False, **actor: Any
) -> Models:
    """Return PPO's four engines. The critic starts from the reward model, whose scores are about 0.5."""
    source, reward = source_in(folder / "actor"), source_in(folder / "reward")
    learner = build_policy(source, trained(zero_stage=zero_stage, lora=lora, **actor), generates=True)
    models = Models(
        actor=learner,
        critic=build_scorer(reward, trained(zero_stage=zero_stage), pad_id=0),
        reference=learner if lora else build_policy(source, frozen(zero_stage=zero_stage)),
        rewards=[build_scorer(reward, frozen(zero_stage=zero_stage), pad_id=0, shift=0.5)],
    )
    for engine in models.engines.values():
        assert not packing or verify(engine, max_length=32)
    assert models.packing == packing
    return models


def advantages_of(rollout: Rollout, section: PpoSection, *, kl_coef: float) -> Advantages:
    """Return the advantages of a rollout with the settings of a section."""
    return compute_advantages(rollout, reward_shaping(section), advantage_estimator(section), kl_coef=kl_coef)


def learn(ppo: Ppo, step: int, rollout: Rollout, advantages: Advantages, budget: int) -> dict[str, float]:
    """Run all updates of a rollout like the training loop. Return their metrics."""
    updates = UpdateMetrics()
    for minibatch in ppo.minibatches(rollout, step, budget):
        ppo.update(step, minibatch, rollout, advantages, updates)
    return updates.summary()
