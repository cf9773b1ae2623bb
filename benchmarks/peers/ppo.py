"""One PPO iteration against TRL 0.19.1's PPOTrainer: 8 prompts of 128 tokens, 128 new tokens each, one epoch."""

import time
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.machine import cpu_precision
from benchmarks.measure import in_turn, median
from benchmarks.peers import tasks
from benchmarks.peers.child_process import measure, memory_and_load, read_task, report_phases
from benchmarks.peers.engines import engine_choice, model_source, start
from benchmarks.peers.environments import TRL_PPO, environment
from benchmarks.record import Result
from engine import Sampling
from engine.parallel import dist
from pipeline.config.stage_sections import PpoSection
from pipeline.models.build import build_policy, build_scorer
from pipeline.models.checks import adopt, verify
from step3_ppo.advantages import compute_advantages
from step3_ppo.models import Models
from step3_ppo.rollout import collect, generate
from step3_ppo.setup import advantage_estimator, reward_shaping
from step3_ppo.update import single_minibatch, update_critic, update_policy

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 128, 128


def make_task(precision: str, *, steps: int, warmup: int) -> dict[str, Any]:
    """Return the task of PPO iterations."""
    prompts = tasks.prompts(PROMPTS, PROMPT_TOKENS)
    return tasks.make(precision, prompts=prompts, new_tokens=NEW_TOKENS, steps=steps, warmup=warmup, budget=2048)


def run(rounds: int) -> list[Result]:
    """Return seconds per iteration: fp32 weights; the peer trains in `cpu_precision`."""
    trl = environment("trl-ppo", TRL_PPO)
    precision = cpu_precision()
    task = make_task(precision, steps=2, warmup=1)
    runs = in_turn(
        {
            "ours": partial(measure, __name__, task),
            "trl": partial(measure, "benchmarks.peers.baselines.trl_ppo", task, python=trl),
        },
        rounds,
    )
    seconds = {side: median([s for figures in side_runs for s in figures.seconds]) for side, side_runs in runs.items()}
    return [
        Result(
            bench="peers",
            case="ppo",
            ours=seconds["ours"],
            unit="s an iteration",
            lower_is_better=True,
            peer=seconds["trl"],
            detail={
                "dtype": precision,
                **memory_and_load(runs["ours"], runs["trl"]),
                "seconds_by_phase": runs["ours"][-1].more["phases"],
            },
        )
    ]


def main() -> None:
    """Run our iterations: the stage's rollout, scoring and updates on four models of one shape."""
    task = read_task()
    start(task)
    frozen = engine_choice(task, learns=False)
    critic = build_scorer(model_source(task, scores=True), engine_choice(task), pad_id=1)
    models = Models(
        actor=build_policy(model_source(task), engine_choice(task), generates=True),
        critic=critic,
        reference=build_policy(model_source(task), frozen),
        rewards=[build_scorer(model_source(task, scores=True), frozen, pad_id=1)],
    )
    longest = len(task["prompts"][0]) + task["new_tokens"]
    verify(models.actor, max_length=longest)
    verify(critic, max_length=longest)
    assert models.reference is not None
    adopt(models.reference, models.actor)
    adopt(models.rewards[0], critic)
    models.actor.flip.parity_check_every = 0
    iterations = [_iterate(models, task, number) for number in range(task["warmup"] + task["steps"])]
    if dist.is_rank_zero():
        report_phases(iterations, task)


def _iterate(models: Models, task: dict[str, Any], number: int) -> dict[str, float]:
    """Run one rollout and one epoch on it; return the seconds of each phase."""
    prompts, budget, section = task["prompts"], task["budget"], PpoSection()
    # Without end ids every answer has its full length.
    sampling = Sampling(max_new_tokens=task["new_tokens"], end_ids=(), seed=number)
    times = [time.perf_counter()]
    answers = generate(models, prompts, sampling, first_seed=number * len(prompts), batch_size=len(prompts))
    times.append(time.perf_counter())
    shared = ("actor", "critic")
    rollout = collect(models, prompts, answers, temperature=1.0, pad_id=1, budget=budget, shared_forwards=shared)
    times.append(time.perf_counter())
    advantages = compute_advantages(
        rollout, reward_shaping(section), advantage_estimator(section), kl_coef=section.kl_coef
    )
    update_policy(models.actor, single_minibatch(rollout), rollout, advantages, section, temperature=1.0)
    assert models.critic is not None
    update_critic(models.critic, single_minibatch(rollout), rollout, advantages, clip=section.value_clip)
    times.append(time.perf_counter())
    assert rollout.tokens() == len(prompts) * task["new_tokens"]
    phases = zip(("generate", "score", "train"), pairwise(times), strict=True)
    return {name: after - before for name, (before, after) in phases}


if __name__ == "__main__":
    main()
