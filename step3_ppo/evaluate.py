"""The start, the log and the end of PPO: evaluation on held-out prompts, the metrics of a step, the export."""

from collections.abc import Sequence

from engine import Sampling
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import is_rank_zero
from pipeline.evaluation.evaluator import Evaluations, Evaluator, compare_models, metrics_of, write_table
from pipeline.evaluation.samples import BEST_OF
from pipeline.evaluation.user_function import UserFunction
from pipeline.models.export import export_policy
from pipeline.stages.stage_run import StageRun
from pipeline.tracking import metrics
from step3_ppo.estimators import Advantages
from step3_ppo.log import ROLLOUTS, UpdateMetrics, log_generator_gap, rollout_metrics
from step3_ppo.microbatch import local_microbatches
from step3_ppo.models import Models, ModelSources
from step3_ppo.rollout import Rollout, score_answers
from step3_ppo.setup import Ppo


def build_evaluator(
    models: Models,
    prompts: Sequence[Prompt],
    tokenizer: ChatTokenizer,
    sampling: Sampling,
    temperatures: Sequence[float],
    *,
    budget: int,
    keep: bool,
    judge: UserFunction | None = None,
    candidates: int = 1,
) -> Evaluator:
    """Return an evaluator whose scores are those of the reward model and the reward function of PPO."""
    token_ids = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]

    def score(answers: Sequence[str]) -> tuple[list[float], list[float] | None]:
        responses = [tokenizer.encode_answer(answer) for answer in answers]
        indices = range(len(prompts))
        batches = local_microbatches(token_ids, responses, indices, tokenizer.pad_id, budget, packing=models.packing)
        pairs = zip(prompts, answers, strict=True)
        calls = [(answer, prompt.row) for prompt, answer in pairs if prompt.row is not None]
        scores = score_answers(models, batches, calls)
        return scores.total, scores.function

    return Evaluator(prompts, tokenizer, sampling, temperatures, judge, score, keep, candidates)


def resume(ppo: Ppo, evaluator: Evaluator, stage: StageRun) -> None:
    """Load the newest checkpoint, or evaluate the SFT model if there is none; then find the micro-batch size."""
    done = stage.restore()
    if is_rank_zero():
        metrics.cut(stage.folder / ROLLOUTS, done)
    if ppo.models.reference is None:  # the start before this one may have had a reference
        stage.last = {name: value for name, value in stage.last.items() if name not in ("kl", "kl_k3")}
    if done == 0:
        evaluations = evaluate_policy(ppo, evaluator, stage, 0)
        with stage.clock.phase("evaluate"):
            best_of = evaluator.evaluate_best(ppo.models.actor)
        write_table(evaluator.prompts, {"sft": evaluations, BEST_OF: best_of}, stage.folder)
        stage.log(0, metrics_of(evaluations))
        stage.save(0)  # the SFT model is the best so far
    stage.find_micro_batch_size(ppo.dry_run)  # after the evaluation: the generator has its memory


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
    ppo.log_rollout(step, rollout, advantages)
    update_metrics = updates.summary()
    loss = update_metrics.get("policy_loss", 0.0) + update_metrics.get("value_loss", 0.0)
    stage.require_finite(step, loss, rollout.responses)
    stage.clock.tokens += rollout.tokens()
    line = rollout_metrics(rollout, advantages) | update_metrics | ppo.metrics() | stage.clock.lap()
    if "kl" in line:
        ppo.kl = ppo.kl.after(line["kl"], len(rollout))
    log_generator_gap(line["generator_gap"])
    if stage.evaluates(step):
        line |= metrics_of(evaluate_policy(ppo, evaluator, stage, step))
    stage.log(step, line)


def evaluate_policy(ppo: Ppo, evaluator: Evaluator, stage: StageRun, step: int) -> Evaluations:
    """Evaluate the weights that the stage would export, and record the metrics that are the best so far."""
    with ppo.models.actor.averaged(), stage.clock.phase("evaluate"):
        evaluations = evaluator.evaluate(ppo.models.actor)
    for name, value in metrics_of(evaluations).items():
        stage.note_best(step, name, value, higher=True)
    return evaluations


def finish(ppo: Ppo, sources: ModelSources, evaluator: Evaluator, stage: StageRun, skipped: dict[str, int]) -> None:
    """Export the model, write the answers of base, SFT and PPO model to samples.jsonl, and write summary.json."""
    folder, actor = stage.folder, ppo.models.actor
    stage.take_best()
    with actor.averaged(), stage.clock.phase("export"):
        export_policy(actor, sources.actor, ppo.tokenizer, folder / "model")
    with actor.averaged(), stage.clock.phase("evaluate"):
        results = compare_models(evaluator.prompts, folder, evaluator.evaluate(actor), evaluator.grade)
    by_model = {name: metrics_of(evaluations) for name, evaluations in results.items()}
    stage.finish({**by_model["ppo"], "held_out": by_model, "skipped": skipped})
