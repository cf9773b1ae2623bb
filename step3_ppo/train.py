"""Stage 3, PPO: the training loop (Schulman et al., 2017; Ouyang et al., 2022; the estimators name their papers)."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.schema import RunConfig
from pipeline.evaluation.evaluator import Evaluator, metrics_of
from pipeline.evaluation.judge import load_judge
from pipeline.models.stage_models import require_context
from pipeline.stages.stage_run import StageRun
from pipeline.stages.start import open_stage, plan_stage
from step3_ppo.advantages import Advantages
from step3_ppo.evaluate import evaluate_policy, finish, ppo_evaluator, resume
from step3_ppo.guard import Guard, evaluation_metrics, open_guard
from step3_ppo.log import UpdateMetrics, log_generator_gap, rollout_metrics, write_rollout_log
from step3_ppo.models import load_models
from step3_ppo.rollout import Rollout
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


def log_step(
    ppo: Ppo,
    evaluator: Evaluator,
    guard: Guard,
    stage: StageRun,
    step: int,
    rollout: Rollout,
    advantages: Advantages,
    updates: UpdateMetrics,
) -> None:
    """Log a step, adapt the weight of the KL, evaluate if an evaluation is due, and let the guard act.

    Raises SharedError if a loss is not finite, and RestartStage if the guard rolls back.
    """
    write_rollout_log(
        stage.folder,
        step,
        rollout,
        advantages,
        text=lambda ids: str(ppo.tokenizer.hf.decode(ids)),
        answers=ppo.section.keep_answers,
        tokens=ppo.section.keep_tokens,
    )
    update_metrics = updates.summary()
    loss = update_metrics.get("policy_loss", 0.0) + update_metrics.get("value_loss", 0.0)
    stage.require_finite(step, loss, rollout.responses)
    stage.clock.tokens += rollout.tokens()
    line = rollout_metrics(rollout, advantages) | update_metrics | ppo.metrics() | stage.clock.lap()
    if "kl" in line:
        ppo.kl = ppo.kl.after(line["kl"], len(rollout))
    log_generator_gap(line["generator_gap"])
    findings = guard.watch(step, line, len(rollout))
    if stage.evaluates(step):
        evaluations, more = evaluate_policy(ppo, evaluator, guard, stage, step, line, findings)
        line |= metrics_of(evaluations) | evaluation_metrics(evaluations)
        findings += more
    stage.log(step, line, guard.report(step, findings))
    guard.act(stage, step, findings)


def run(config: RunConfig, folder: Path) -> None:
    """Set up, train, evaluate and export. `folder` is RUN/ppo."""
    sources = load_models(config, folder.parent)
    for source in filter(None, (sources.actor, sources.critic, *sources.rewards, sources.teacher)):
        require_context(config, "ppo", source)
    prompts, evaluation_prompts, skipped = load_prompts(config, sources)
    reward, held_out = next(iter(sources.rewards), None), len(evaluation_prompts)
    plan = plan_stage(config, "ppo", folder, prompts, policy=sources.actor, reward=reward, held_out=held_out)
    config, rollout = plan.config, plan.config.rollout
    ppo = Ppo(config, sources, prompts)
    evaluator = ppo_evaluator(config, ppo.models, sources.tokenizer, evaluation_prompts, folder)
    guard = open_guard(config, folder, has_judge=evaluator.has_judge)
    with open_stage(
        plan,
        "ppo",
        folder,
        ppo.models.engines,
        best_metric=guard.best_metric,
        longest=max(len(prompt.ids) for prompt in prompts) + rollout.max_new_tokens,
        extra=lambda: {"kl_coef": ppo.kl.coef, "guard": guard.state()},
        restore_extra=partial(restore, ppo, guard),
    ) as stage:
        resume(ppo, evaluator, guard, stage)
        train(ppo, evaluator, guard, stage)
        finish(ppo, sources, evaluator, guard, stage, skipped=skipped, pair_judge=load_judge(config, "pair_judge"))


def restore(ppo: Ppo, guard: Guard, state: dict[str, Any]) -> None:
    """Restore the KL coefficient and the history of the guard from a checkpoint."""
    ppo.kl = replace(ppo.kl, coef=state["kl_coef"])
    guard.restore(state["guard"])
