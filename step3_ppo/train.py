"""Stage 3, PPO: the training loop (Schulman et al., 2017; Ouyang et al., 2022; the estimators name their papers)."""

from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.schema import RunConfig
from pipeline.evaluation.evaluator import EVALUATION_SEED, Evaluator
from pipeline.evaluation.judge import load_judge, load_pair_judge
from pipeline.models.stage_models import require_context
from pipeline.stages.stage_run import StageRun
from pipeline.stages.start import open_stage, plan_stage, sampling
from step3_ppo.evaluate import build_evaluator, finish, log_step, resume
from step3_ppo.guard import Guard, open_guard
from step3_ppo.log import UpdateMetrics
from step3_ppo.models import load_models
from step3_ppo.setup import Ppo, load_prompts


def train(ppo: Ppo, evaluator: Evaluator, guard: Guard, stage: StageRun) -> None:
    """Take the PPO steps that are left."""
    for step in stage.steps_left():
        rollout = ppo.collect(step, stage)  # y ~ pi_old(. | x), scores, log-probs, values
        advantages = ppo.compute_advantages(rollout)  # score - beta * KL, GAE, whitening
        updates = UpdateMetrics()
        with stage.clock.phase("train"):
            for minibatch in ppo.minibatches(rollout, step, stage.budget):
                ppo.update(step, minibatch, rollout, advantages, updates)  # clipped policy and value losses
        log_step(ppo, evaluator, guard, stage, step, rollout, advantages, updates)
        stage.save(step)


def run(config: RunConfig, folder: Path) -> None:
    """Set up, train, evaluate and export. `folder` is RUN/ppo."""
    sources = load_models(config, folder.parent)
    require_context(config, "ppo", sources.actor)
    require_context(config, "ppo", sources.critic)
    prompts, evaluation_prompts, skipped = load_prompts(config, sources)
    plan = plan_stage(
        config, "ppo", folder, prompts.ids, policy=sources.actor, reward=next(iter(sources.rewards), None)
    )
    config, rollout = plan.config, plan.config.rollout
    ppo = Ppo(config, folder, sources, prompts.ids, prompts.rows)
    evaluator = build_evaluator(
        ppo.models,
        evaluation_prompts,
        sources.tokenizer,
        sampling(rollout, sources.tokenizer, seed=EVALUATION_SEED),
        config.temperatures,
        budget=config.ppo.micro_batch_tokens,
        keep=rollout.keep,
        judge=load_judge(config),
        candidates=config.evaluation.best_of,
    )
    guard = open_guard(config, folder, has_judge=evaluator.has_judge)
    with open_stage(
        plan,
        "ppo",
        folder,
        ppo.models.learning,
        best_metric=guard.best_metric,
        keeps_best=config.ppo.guard in ("stop", "rollback"),
        longest=max(map(len, prompts.ids)) + rollout.max_new_tokens,
        frozen=ppo.models.frozen,
        extra=lambda: {"kl_coef": ppo.kl.coef, "guard": guard.state()},
        take=partial(restore, ppo, guard),
    ) as stage:
        resume(ppo, evaluator, guard, stage)
        train(ppo, evaluator, guard, stage)
        export_best = config.ppo.export == "best"
        pair_judge = load_pair_judge(config)
        finish(
            ppo,
            sources,
            evaluator,
            guard,
            stage,
            lora=config.ppo.lora,
            export_best=export_best,
            skipped=skipped,
            pair_judge=pair_judge,
        )


def restore(ppo: Ppo, guard: Guard, state: dict[str, Any]) -> None:
    """Restore the KL coefficient and the history of the guard from a checkpoint."""
    ppo.set_kl_coef(state["kl_coef"])
    guard.restore(state.get("guard", {}))
