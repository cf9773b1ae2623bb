"""Generate and grade answers of the base, SFT and PPO (or DPO) models to the same held-out prompts.

Each model answers at each of `evaluation.temperatures`.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import Engine, Sampling, distributed
from pipeline.data.microbatches import gather_by_index
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.judge import Verdicts, can_judge, compare_pairs, judged
from pipeline.evaluation.samples import BEST_OF, GRADES, KINDS, SAMPLES, Sample, read_samples, write_samples
from pipeline.files import explained_disk, read_settings

if TYPE_CHECKING:
    from pipeline.evaluation.user_function import UserFunction

EVALUATION_SEED = 20011


@dataclass(frozen=True)
class Evaluation:
    """The answers of one policy at one temperature to the held-out prompts. A missing kind of grade is None.

    scores: the scores that PPO is trained on
    gold: the grades of a judge, which are never used for training
    function: the reward function's share of the scores, if a reward model scores the answers too
    preferences: the verdicts of a pair judge on these answers against those of the SFT model
    """

    answers: list[str]
    scores: list[float] | None
    gold: list[float] | None
    function: list[float] | None = None
    preferences: list[Verdicts] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each kind of grade."""
        grades = {"eval_score": self.scores, "eval_function_score": self.function, "gold_score": self.gold}
        return {name: statistics.fmean(values) for name, values in grades.items() if values is not None}


Evaluations = Mapping[float, Evaluation]
"""The evaluations of one policy by temperature."""


def metrics_of(evaluations: Evaluations) -> dict[str, float]:
    """Return the metrics of all temperatures. The names of all but the first temperature end with `_at_TEMPERATURE`."""
    first = next(iter(evaluations), None)
    return {
        name if temperature == first else f"{name}_at_{temperature:g}": value
        for temperature, evaluation in evaluations.items()
        for name, value in evaluation.metrics.items()
    }


Scorer = Callable[[Sequence[str]], tuple[list[float] | None, list[float] | None]]
"""Maps one answer per held-out prompt to the scores, and to the reward function's share of them (see `Evaluation`)."""


def answers_of(
    engine: Engine, tokenizer: ChatTokenizer, prompts: Sequence[Prompt], settings: Sequence[Sampling], *, keep: bool
) -> list[list[str]]:
    """Generate one answer per prompt for each of the settings, and return all answers on every rank.

    The ranks divide the prompts among them. The sampling noise depends on the index of the prompt, so that every model
    samples with the same noise. `keep` leaves the generator's weights and cache in memory for the next call.
    """
    encoded = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
    with engine.generating(keep=keep) as generator:
        indices = engine.flip.assign([len(ids) for ids in encoded])
        local_prompts = [encoded[index] for index in indices]
        results = [
            generator.generate(local_prompts, sampling, indices, text=tokenizer.decode_unstripped) if indices else []
            for sampling in settings
        ]
    texts = [
        {index: tokenizer.decode(result.token_ids, sampling.stop) for index, result in zip(indices, local, strict=True)}
        for sampling, local in zip(settings, results, strict=True)
    ]
    return [gather_by_index(by_index) for by_index in texts]


@dataclass(frozen=True)
class Evaluator:
    """Generate and grade the answers of a policy to the held-out prompts. All policies use the same sampling noise.

    temperatures: the temperatures at which the policy answers, instead of that of `sampling`
    judge: returns the gold score; None uses the gold scorer of the demo's prompts
    score: returns the scores that PPO is trained on; None for answers that it cannot score
    shape: maps answers and their scores to the scores with the penalties of PPO, by which `evaluate_best` selects; None
        selects by the scores
    answer: returns the answers, as `answers_of` does
    keep: whether the generator's weights and cache remain in memory for the next evaluation
    candidates: the number of answers from which `evaluate_best` selects one
    """

    prompts: Sequence[Prompt]
    tokenizer: ChatTokenizer
    sampling: Sampling
    temperatures: Sequence[float]
    judge: "UserFunction | None" = None
    score: Scorer | None = None
    shape: Callable[[Sequence[str], Sequence[float]], Sequence[float]] | None = None
    keep: bool = False
    candidates: int = 1
    answer: Callable[..., list[list[str]]] = answers_of

    @property
    def has_judge(self) -> bool:
        """Whether answers to these prompts get a gold score."""
        return can_judge(self.prompts, self.judge)

    def evaluate(self, engine: Engine) -> dict[float, Evaluation]:
        """Generate and grade the answers of the policy in `engine` at each temperature."""
        settings = [replace(self.sampling, temperature=temperature) for temperature in self.temperatures]
        answers = self.answer(engine, self.tokenizer, self.prompts, settings, keep=self.keep)
        return {temperature: self.grade(texts) for temperature, texts in zip(self.temperatures, answers, strict=True)}

    def evaluate_best(self, engine: Engine, evaluations: Evaluations) -> dict[float, Evaluation]:
        """Sample `candidates` answers per prompt, and return the evaluation of those that PPO rewards most.

        `evaluations` are those of the same policy. Their answers are the first candidates. The others are sampled at
        the first temperature that is not 0. The result is empty if there is none, if there are no scores, or if
        `candidates` is 1.
        """
        count = self.candidates
        temperature = next((temperature for temperature in self.temperatures if temperature > 0), None)
        if temperature is None or self.score is None or count == 1 or not self.prompts:
            return {}
        settings = [
            replace(self.sampling, temperature=temperature, seed=self.sampling.seed + number)
            for number in range(1, count)
        ]
        first = evaluations[temperature]
        assert first.scores is not None
        shape = self.shape or (lambda _, scores: scores)
        shaped = [shape(first.answers, first.scores)]  # before others are sampled: episodes remember the newest only
        others = self.answer(engine, self.tokenizer, self.prompts, settings, keep=self.keep)
        candidates = [first.answers, *others]
        graded = [(first.scores, first.function), *map(self.score, others)]
        columns = [scores for scores, _ in graded if scores is not None]
        shaped += map(shape, others, columns[1:])
        best = [max(range(count), key=column.__getitem__) for column in zip(*shaped, strict=True)]

        def select(columns: Sequence[Sequence[Any]]) -> list[Any]:
            return [columns[number][index] for index, number in enumerate(best)]

        answers = select(candidates)
        functions = [function for _, function in graded if function is not None]
        evaluation = Evaluation(
            answers,
            select(columns),
            judged(self.prompts, answers, self.judge),
            select(functions) if functions else None,
        )
        return {temperature: evaluation}

    def grade(self, answers: Sequence[str]) -> Evaluation:
        """Grade one answer per prompt."""
        scores, function = (None, None) if self.score is None else self.score(answers)
        return Evaluation(list(answers), scores, judged(self.prompts, answers, self.judge), function)


def answer_again(evaluator: Evaluator, folder: Path, engine: Engine, name: str) -> None:
    """Answer the prompts with the model `name` that a stage started from, if it resumes without all of these answers.

    The launcher empties samples.jsonl in `folder` if settings of the answers have changed. Call this before the stage
    loads its checkpoint. Collective.
    """
    recorded = [earlier_answers(evaluator.prompts, folder, name, at) for at in evaluator.temperatures]
    if distributed.broadcast_object(None in recorded and (folder / SAMPLES).exists()):
        evaluations = evaluator.evaluate(engine)
        best_of = evaluator.evaluate_best(engine, evaluations)
        write_table(evaluator.prompts, {name: evaluations, BEST_OF: best_of}, folder)


def compare_models(
    evaluator: Evaluator, folder: Path, own: Evaluations, pair_judge: "UserFunction | None" = None
) -> dict[str, Evaluations]:
    """Grade the earlier answers of the other models again, and return the evaluations of all models by name.

    These are the base model, the SFT model, and the best of several SFT answers (`Evaluator.evaluate_best`).

    A model whose earlier answers are incomplete at a temperature has no evaluation at this temperature. The base model
    has none if the SFT stage sampled its answers with other settings. Equal answers to a prompt get equal grades.

    A pair judge compares the stage's own answers with those of the SFT model. The function also writes samples.jsonl in
    `folder`, with the stage's own answers and the earlier ones.
    """
    prompts, results = evaluator.prompts, dict[str, Evaluations]()
    for name, source in (("base", folder.parent / "sft"), ("sft", folder), (BEST_OF, folder)):
        if not _sample_alike(source, folder):
            continue
        earlier = {temperature: earlier_answers(prompts, source, name, temperature) for temperature in own}
        graded = {temperature: evaluator.grade(texts) for temperature, texts in earlier.items() if texts is not None}
        for other in (own, *results.values()):
            graded = {at: graded_alike(each, other[at]) if at in other else each for at, each in graded.items()}
        if graded:
            results[name] = graded
    if pair_judge is not None:
        own = {
            temperature: replace(
                evaluation,
                preferences=compare_pairs(prompts, evaluation.answers, results["sft"][temperature].answers, pair_judge),
            )
            if temperature in results.get("sft", {})
            else evaluation
            for temperature, evaluation in own.items()
        }
    results[folder.name] = own
    write_table(prompts, results, folder)
    return results


def graded_alike(evaluation: Evaluation, other: Evaluation) -> Evaluation:
    """Return `evaluation` with the grades that `other` has for the same answers to the same prompts.

    Micro-batches round differently, so that an equal answer would otherwise count as better or worse.
    """

    def grades(kind: str) -> list[float] | None:
        mine, others = getattr(evaluation, kind), getattr(other, kind)
        rows = zip(evaluation.answers, other.answers, mine or (), others or (), strict=False)
        return [theirs if one == two else own for one, two, own, theirs in rows] if mine and others else mine

    return replace(evaluation, scores=grades("scores"), gold=grades("gold"), function=grades("function"))


def _sample_alike(*stages: Path) -> bool:
    """Return whether two stages have sampled their answers with the same settings, apart from the temperatures."""
    one, other = (read_settings(folder).get("rollout") or {} for folder in stages)
    names = {each.name for each in fields(Sampling)} - {"temperature"}
    return all(one[name] == other[name] for name in names & one.keys() & other.keys())


def earlier_answers(prompts: Sequence[Prompt], folder: Path, name: str, temperature: float) -> list[str] | None:
    """Return a model's answers to the same prompts from samples.jsonl in `folder`; None if any answer is missing."""
    recorded = {sample.key: sample.answers.get(name) for sample in read_samples(folder / SAMPLES)}
    answers = [recorded.get((prompt.messages, temperature)) for prompt in prompts]
    return [answer for answer in answers if answer is not None] if None not in answers else None


def write_grades(folder: Path, step: int, evaluations: Evaluations) -> None:
    """Append the grades of each answer of an evaluation to evaluations.jsonl, one line per temperature."""
    if not evaluations or not distributed.is_rank_zero():
        return
    lines = []
    for temperature, evaluation in evaluations.items():
        kinds = {"scores": evaluation.scores, "gold": evaluation.gold}
        grades = {kind: [round(v, 6) for v in values] for kind, values in kinds.items() if values is not None}
        lines.append(json.dumps({"step": step, "temperature": temperature, **grades}) + "\n")
    with explained_disk(folder), (folder / GRADES).open("a", encoding="utf-8") as file:
        file.writelines(lines)


def write_table(
    prompts: Sequence[Prompt], results: Mapping[str, Evaluations], folder: Path, *, extend: bool = False
) -> None:
    """Write samples.jsonl: one line per temperature and prompt, with every model's answer, scores and gold score.

    With `extend`, the answers of other models that the file already contains remain.
    """
    if distributed.is_rank_zero():
        earlier = {sample.key: sample for sample in read_samples(folder / SAMPLES)} if extend else {}
        temperatures = dict.fromkeys(temperature for evaluations in results.values() for temperature in evaluations)
        samples = []
        for temperature in temperatures:
            at = {name: found[temperature] for name, found in results.items() if temperature in found}
            columns = {
                kind: {name: column for name, result in at.items() if (column := getattr(result, kind)) is not None}
                for kind in ("answers", *KINDS)
            }
            for i, prompt in enumerate(prompts):
                row = {kind: {name: column[i] for name, column in of_kind.items()} for kind, of_kind in columns.items()}
                samples.append(Sample(prompt.messages, temperature=temperature, **row))
        write_samples(folder / SAMPLES, [sample.merge(earlier.get(sample.key)) for sample in samples])
    distributed.barrier()
