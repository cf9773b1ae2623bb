"""The evaluation of PPO on held-out prompts, and the export at the end of the stage."""

from collections.abc import Sequence

from engine import Sampling
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.evaluator import Evaluation, Evaluator, compare_models
from pipeline.evaluation.user_function import UserFunction
from pipeline.models.export import export_policy
from pipeline.stages.stage_run import StageRun
from step3_ppo.models import Models, ModelSources
from step3_ppo.rows import my_rows
from step3_ppo.scores import score_answers
from step3_ppo.setup import Ppo


def evaluator_of(
    models: Models,
    prompts: Sequence[Prompt],
    tokenizer: ChatTokenizer,
    sampling: Sampling,
    *,
    budget: int,
    keep: bool,
    judge: UserFunction | None = None,
) -> Evaluator:
    """Return an evaluator whose scores are those of the reward model and the reward function of PPO."""
    token_ids = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]

    def score(answers: Sequence[str]) -> tuple[list[float], list[float] | None]:
        responses = [tokenizer.encode_answer(answer) for answer in answers]
        indices = range(len(prompts))
        batches = my_rows(token_ids, responses, indices, tokenizer.pad_id, budget, packing=models.pack)
        pairs = zip(prompts, answers, strict=True)
        calls = [(answer, prompt.row) for prompt, answer in pairs if prompt.row is not None]
        scores = score_answers(models, batches, calls)
        return scores.total, scores.function

    return Evaluator(prompts, tokenizer, sampling, judge, score, keep)


def evaluate_policy(ppo: Ppo, evaluator: Evaluator, stage: StageRun, step: int) -> Evaluation:
    """Evaluate the actor, and note the metrics as the best if they are."""
    with stage.clock.phase("evaluate"):
        evaluation = evaluator.evaluate(ppo.models.actor)
    for name, value in evaluation.metrics.items():
        stage.note_best(step, name, value, higher=True)
    return evaluation


def finish(ppo: Ppo, sources: ModelSources, evaluator: Evaluator, stage: StageRun, skipped: dict[str, int]) -> None:
    """Export the model, write the answers of base, SFT and PPO model to samples.jsonl, and write summary.json."""
    folder, actor = stage.folder, ppo.models.actor
    stage.take_best()
    with actor.averaged(), stage.clock.phase("export"):
        export_policy(actor, sources.actor, ppo.tokenizer, folder / "model")
    with actor.averaged(), stage.clock.phase("evaluate"):
        results = compare_models(evaluator.prompts, folder, evaluator.evaluate(actor), evaluator.grade)
    metrics = {name: result.metrics for name, result in results.items()}
    stage.finish(
        {
            "gold_score": metrics["ppo"].get("gold_score"),
            "eval_score": metrics["ppo"]["eval_score"],
            "held_out": metrics,
            "skipped": skipped,
        }
    )
