"""Stage 3, PPO: the training loop (Schulman et al., 2017; Ouyang et al., 2022; the estimators name their papers)."""

from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.distributed import is_rank_zero
from pipeline.evaluation.evaluator import EVALUATION_SEED, Evaluator, write_table
from pipeline.evaluation.judge import load_judge
from pipeline.models.stage_models import require_context
from pipeline.stages.settings import sampling
from pipeline.stages.stage_run import StageRun
from pipeline.stages.start import open_stage, plan_stage
from pipeline.tracking import metrics
from step3_ppo.estimators import Advantages
from step3_ppo.evaluate import evaluate_policy, evaluator_of, finish
from step3_ppo.log import ROLLOUTS, UpdateMetrics, log_generator_gap, rollout_metrics
from step3_ppo.models import load_models
from step3_ppo.rollout import Rollout
from step3_ppo.setup import Ppo, load_prompts


def train(ppo: Ppo, evaluator: Evaluator, stage: StageRun) -> None:
    """Take the PPO steps that are left."""
    for step in stage.steps_left():
        rollout = ppo.collect(step, stage)  # y ~ pi_old(. | x), scores, log-probs, values
        advantages = ppo.compute_advantages(rollout)  # score - beta * KL, GAE, whitening
        updates = UpdateMetrics()
        with stage.clock.phase("train"):
            for minibatch in ppo.minibatches(rollout, step, stage.budget):
                ppo.update(step, minibatch, rollout, advantages, updates)  # clipped policy and value losses
        log_step(ppo, evaluator, stage, step, rollout, advantages, updates)
        stage.save(step)


def run(config: RunConfig, folder: Path) -> None:
    """Set up, train, evaluate and export. `folder` is RUN/ppo."""
    sources = load_models(config, folder.parent)
    require_context(config, "ppo", sources.actor)
    require_context(config, "ppo", sources.critic)
    prompts, held_out, skipped = load_prompts(config, sources)
    plan = plan_stage(config, "ppo", folder, len(prompts.ids), policy=sources.actor, reward=sources.reward)
    config, rollout = plan.config, plan.config.rollout
    ppo = Ppo(config, folder, sources, prompts.ids, prompts.rows)
    evaluator = evaluator_of(
        ppo.models,
        held_out,
        sources.tokenizer,
        sampling(rollout, sources.tokenizer, seed=EVALUATION_SEED),
        budget=ppo.section.micro_batch_tokens,
        keep=rollout.keep,
        judge=load_judge(config),
    )
    with open_stage(
        plan,
        "ppo",
        folder,
        ppo.models.learning,
        best_metric="eval_score",
        longest=max(map(len, prompts.ids)) + rollout.max_new_tokens,
        frozen={name: engine for name, engine in ppo.models.engines.items() if name in ("reference", "reward")},
        extra=lambda: {"kl_coef": ppo.kl.coef},
        take=lambda extra: ppo.set_kl_coef(extra["kl_coef"]),
    ) as stage:
        resume(ppo, evaluator, stage)
        train(ppo, evaluator, stage)
        finish(ppo, sources, evaluator, stage, skipped)


def resume(ppo: Ppo, evaluator: Evaluator, stage: StageRun) -> None:
    """Load the newest checkpoint, or evaluate the SFT model if there is none."""
    done = stage.restore()
    if is_rank_zero():
        metrics.cut(stage.folder / ROLLOUTS, done)
    if not ppo.section.asks_reference:  # the start before this one may have had a reference
        stage.last = {name: value for name, value in stage.last.items() if name not in ("kl", "kl_k3")}
    if done == 0:
        evaluation = evaluate_policy(ppo, evaluator, stage, 0)
        write_table(evaluator.prompts, {"sft": evaluation}, stage.folder)
        stage.log(0, evaluation.metrics)
        stage.save(0)  # the SFT model is the best so far
    stage.find_micro_batch_size(ppo.dry_run)  # while the generator holds its memory


def log_step(
    ppo: Ppo,
    evaluator: Evaluator,
    stage: StageRun,
    step: int,
    rollout: Rollout,
    advantages: Advantages,
    updates: UpdateMetrics,
) -> None:
    """Log a step, adapt the weight of the KL, and evaluate if an evaluation is due.

    Raises SharedError if a loss is not finite.
    """
    ppo.write_rollout_log(step, rollout, advantages)
    learned = updates.summary()
    stage.require_finite(step, learned.get("policy_loss", 0.0) + learned.get("value_loss", 0.0), rollout.responses)
    stage.clock.tokens += rollout.tokens()
    line = rollout_metrics(rollout, advantages) | learned | ppo.state() | stage.clock.lap()
    if "kl" in line:
        ppo.kl = ppo.kl.after(line["kl"], len(rollout))
    log_generator_gap(line["generator_gap"])
    if stage.evaluates(step):
        line |= evaluate_policy(ppo, evaluator, stage, step).metrics
    stage.log(step, line)
