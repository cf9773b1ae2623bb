"""Our PPO iterations: the stage's rollout, scoring and updates on four models of one shape."""

import time
from itertools import pairwise
from typing import Any

from benchmarks.measure import median
from benchmarks.peers.children import report, told
from benchmarks.peers.ours.engines import begin, choice, source
from engine import Sampling
from engine.parallel import dist
from pipeline.config.schema import PpoSection
from pipeline.models.build import build_policy, build_scorer
from pipeline.models.checks import adopt, verify
from step3_ppo.estimators import compute_advantages
from step3_ppo.models import Models
from step3_ppo.rollout import collect, generate
from step3_ppo.setup import advantage_estimator, policy_loss_settings, reward_shaping
from step3_ppo.update import single_minibatch, update_critic, update_policy


def main() -> None:
    """Iterate, and tell the iterations' times."""
    work = told()
    begin(work)
    frozen = choice(work, learns=False)
    critic = build_scorer(source(work, scores=True), choice(work), pad_id=1)
    models = Models(
        actor=build_policy(source(work), choice(work), generates=True),
        critic=critic,
        reference=build_policy(source(work), frozen),
        reward=build_scorer(source(work, scores=True), frozen, pad_id=1),
        reward_mean=0.0,
    )
    longest = len(work["prompts"][0]) + work["new_tokens"]
    verify(models.actor, max_length=longest)
    verify(critic, max_length=longest)
    assert models.reference is not None and models.reward is not None
    adopt(models.reference, models.actor)
    adopt(models.reward, critic)
    models.actor.flip.parity_check_every = 0
    clocks = [_iteration(models, work, number) for number in range(work["warmup"] + work["steps"])]
    measured = clocks[work["warmup"] :]
    if dist.world().is_rank_zero:
        phases = {name: median([clock[name] for clock in measured]) for name in measured[0]}
        tokens = float(len(work["prompts"]) * work["new_tokens"])
        report([sum(clock.values()) for clock in measured], [tokens] * len(measured), phases=phases)


def _iteration(models: Models, work: dict[str, Any], number: int) -> dict[str, float]:
    """One rollout and one epoch on it; the seconds of each phase."""
    prompts, budget, section = work["prompts"], work["budget"], PpoSection()
    how = Sampling(max_new_tokens=work["new_tokens"], end_ids=(), pad_id=1, seed=number)  # all have their full length
    times = [time.perf_counter()]
    drawn = generate(models, prompts, how, first_seed=number * len(prompts), batch_size=len(prompts))
    times.append(time.perf_counter())
    shared = ("actor", "critic")
    rollout = collect(models, prompts, drawn, temperature=1.0, pad_id=1, budget=budget, shared_forwards=shared)
    times.append(time.perf_counter())
    advantages = compute_advantages(
        rollout, reward_shaping(section), advantage_estimator(section), kl_coef=section.kl_coef
    )
    update_policy(models.actor, single_minibatch(rollout), rollout, advantages, policy_loss_settings(section, 1.0))
    assert models.critic is not None
    update_critic(models.critic, single_minibatch(rollout), rollout, advantages, clip=section.value_clip)
    times.append(time.perf_counter())
    assert rollout.tokens() == len(prompts) * work["new_tokens"]
    phases = zip(("generate", "score", "train"), pairwise(times), strict=True)
    return {name: after - before for name, (before, after) in phases}


if __name__ == "__main__":
    main()
