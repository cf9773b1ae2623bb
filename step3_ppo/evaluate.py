"""The start and the end of PPO, and its evaluation on held-out prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine import Engine, Sampling, distributed
from pipeline.config.schema import RunConfig
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.evaluator import (
    Evaluations,
    Evaluator,
    answer_again,
    compare_models,
    metrics_of,
    write_grades,
    write_table,
)
from pipeline.evaluation.samples import BEST_OF, GRADES, SAMPLES, read_samples
from pipeline.models.export import export_policy
from pipeline.stages.stage_run import StageRun
from pipeline.stages.start import build_evaluator
from pipeline.tracking import metrics
from step3_ppo.advantages import RewardShaping, answer_scores
from step3_ppo.guard import Guard, evaluation_metrics
from step3_ppo.guard_rules import Finding
from step3_ppo.log import ROLLOUTS
from step3_ppo.models import Models, ModelSources
from step3_ppo.rollout import score_answers
from step3_ppo.setup import Ppo, reward_shaping

if TYPE_CHECKING:
    from pipeline.evaluation.user_function import UserFunction


def ppo_evaluator(
    config: RunConfig, models: Models, tokenizer: ChatTokenizer, prompts: Sequence[Prompt], folder: Path
) -> Evaluator:
    """Return an evaluator whose scores are those of the reward model and the reward function of PPO, if it has any.

    It plays episodes if the reward function takes turns. `folder` is RUN/ppo.
    """
    keep, candidates = config.rollout.keep, config.evaluation.best_of
    shaping = reward_shaping(config.ppo, unit=models.score_unit)
    evaluator = replace(build_evaluator(config, tokenizer, prompts), keep=keep, candidates=candidates)
    if models.takes_turns:
        played = PlayedEpisodes(models, prompts, folder, shaping)
        return replace(evaluator, score=played.scores, shape=played.shaped_scores, answer=played.answer)
    if not models.has_rewards:
        return evaluator
    token_ids = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
    longest = config.rollout.max_new_tokens

    def score(answers: Sequence[str]) -> tuple[list[float], list[float] | None]:
        # As in a rollout, the end token replaces the last token of a cut answer.
        encoded = [tokenizer.encode_answer(answer)[:longest] for answer in answers]
        responses = [[*ids[:-1], tokenizer.end_id] for ids in encoded]
        pairs = zip(prompts, answers, strict=True)
        calls = [(answer, prompt.row) for prompt, answer in pairs if prompt.row is not None]
        budget = config.ppo.micro_batch_tokens
        scores = score_answers(models, token_ids, responses, calls, pad_id=tokenizer.pad_id, budget=budget)
        return scores.total, scores.function

    def shape(answers: Sequence[str], scores: Sequence[float]) -> list[float]:
        lengths = torch.tensor([*map(len, tokenizer.encode_answers(answers))])
        # A cut answer has `longest` tokens, and then encode_answer adds an end token.
        shaped = answer_scores(torch.tensor(scores), lengths <= longest, lengths.clamp(max=longest), shaping)
        return [float(each) for each in shaped]

    return replace(evaluator, score=score, shape=shape)


class PlayedEpisodes:
    """The scores of episodes on held-out prompts. A text alone cannot be scored again.

    The scores of the newest episodes are in memory, also with the penalties of PPO. Those of earlier ones are read from
    samples.jsonl in `folder`.
    """

    def __init__(self, models: Models, prompts: Sequence[Prompt], folder: Path, shaping: RewardShaping) -> None:
        self._models, self._prompts, self._file, self._shaping = models, prompts, folder / SAMPLES, shaping
        self._newest: dict[tuple[Any, str], tuple[float, float]] = {}

    def answer(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        prompts: Sequence[Prompt],
        settings: Sequence[Sampling],
        *,
        keep: bool,
    ) -> list[list[str]]:
        """Play one episode per prompt for each of several settings, hold their scores, and return their texts."""
        from pipeline.evaluation.episodes import play_episodes

        token_ids = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
        rows = [prompt.row or {} for prompt in prompts]
        assert self._models.function is not None
        played = play_episodes(engine, self._models.function, tokenizer, token_ids, rows, settings, keep=keep)
        self._newest = {}
        for episodes in played:
            rewards = [episode.rewards for episode in episodes]
            scores = score_answers(self._models, [], [], pad_id=0, budget=1, played=rewards).total
            finished = torch.tensor([episode.finished for episode in episodes])
            lengths = torch.tensor([len(episode.logprobs) for episode in episodes])  # without messages
            shaped = answer_scores(torch.tensor(scores), finished, lengths, self._shaping).tolist()
            keys = self._keys([episode.text for episode in episodes])
            self._newest |= zip(keys, zip(scores, shaped, strict=True), strict=True)
        return [[episode.text for episode in episodes] for episodes in played]

    def scores(self, texts: Sequence[str]) -> tuple[list[float] | None, None]:
        """Return the score of each text; None if any text is not that of a recorded episode."""
        known = {
            (sample.prompt, sample.answers[name]): score
            for sample in read_samples(self._file)
            for name, score in sample.scores.items()
        }
        known |= {key: score for key, (score, _) in self._newest.items()}
        found = [known[key] for key in self._keys(texts) if key in known]
        return (found if len(found) == len(texts) else None), None

    def shaped_scores(self, texts: Sequence[str], _: Sequence[float]) -> list[float]:
        """Return the score of each of the newest episodes, less the penalties of PPO."""
        return [self._newest[key][1] for key in self._keys(texts)]

    def _keys(self, texts: Sequence[str]) -> list[tuple[Any, str]]:
        return [(prompt.messages, text) for prompt, text in zip(self._prompts, texts, strict=True)]


def resume(ppo: Ppo, evaluator: Evaluator, guard: Guard, stage: StageRun) -> None:
    """Load the newest checkpoint, or evaluate the SFT model if there is none; then find the micro-batch size."""
    with stage.clock.phase("evaluate"):
        answer_again(evaluator, stage.folder, ppo.models.actor, "sft")
    done = stage.restore()
    if distributed.is_rank_zero():
        metrics.cut(stage.folder / ROLLOUTS, done)
        metrics.cut(stage.folder / GRADES, done)
    if ppo.models.reference is None:  # the start before this one may have had a reference
        stage.last = {name: value for name, value in stage.last.items() if name not in ("kl", "kl_k3")}
    if done == 0:
        evaluations, findings = evaluate_policy(ppo, evaluator, guard, stage, 0, {})
        with stage.clock.phase("evaluate"):
            best_of = evaluator.evaluate_best(ppo.models.actor, evaluations)
        write_table(evaluator.prompts, {"sft": evaluations, BEST_OF: best_of}, stage.folder)
        stage.log(0, metrics_of(evaluations) | evaluation_metrics(evaluations), guard.report(0, findings))
        guard.act(stage, 0, findings)
        stage.save(0)  # the SFT model is the best so far
    elif guard.stopped_step is not None:
        stage.last_step = guard.stopped_step
    stage.find_micro_batch_size(ppo.dry_run)  # after the evaluation: the generator has its memory


def evaluate_policy(
    ppo: Ppo,
    evaluator: Evaluator,
    guard: Guard,
    stage: StageRun,
    step: int,
    line: Mapping[str, float],
    findings: Sequence[Finding] = (),
) -> tuple[Evaluations, list[Finding]]:
    """Evaluate the weights that the stage would export, record the best metrics, and return the guard's findings.

    `line` and `findings` are the metrics of the rollout and the findings about it.
    """
    with ppo.models.actor.averaged(), stage.clock.phase("evaluate"):
        evaluations = evaluator.evaluate(ppo.models.actor)
    ppo.evaluated_step, ppo.evaluations = step, evaluations
    more = guard.watch_evaluation(step, evaluations, is_last=step == stage.steps)
    for name, value in (metrics_of(evaluations) | guard.selection(evaluations)).items():
        may_be_best = name != guard.best_metric or guard.may_be_best(line, [*findings, *more])
        if may_be_best and stage.note_best(step, name, value, higher=True) and name == guard.best_metric:
            guard.best_step = step
    write_grades(stage.folder, step, evaluations)
    return evaluations, more


def finish(
    ppo: Ppo,
    sources: ModelSources,
    evaluator: Evaluator,
    guard: Guard,
    stage: StageRun,
    *,
    skipped: dict[str, int],
    pair_judge: "UserFunction | None" = None,
) -> None:
    """Export the model, write the answers of base, SFT and PPO model to samples.jsonl, and write summary.json.

    The model is that of the best step if `ppo.export` is "best", or if the guard has stopped the stage.
    """
    folder, actor = stage.folder, ppo.models.actor
    if ppo.section.export == "best" or guard.stopped_step is not None:
        stage.take_best()
    with actor.averaged(), stage.clock.phase("export"):
        export_policy(actor, sources.actor, ppo.tokenizer, folder / "model", lora=ppo.section.lora)
    with actor.averaged(), stage.clock.phase("evaluate"):
        is_evaluated = ppo.evaluated_step == stage.exported_step  # not after a restart, or with an earlier best step
        evaluations = ppo.evaluations if is_evaluated else evaluator.evaluate(actor)
        results = compare_models(evaluator, folder, evaluations, pair_judge)
    by_model = {name: metrics_of(evaluations) for name, evaluations in results.items()}
    stage.finish({**by_model["ppo"], "held_out": by_model, "skipped": skipped, "guard": guard.summary()})
