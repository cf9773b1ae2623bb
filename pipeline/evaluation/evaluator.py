"""Generate and grade answers of the base, SFT and PPO (or DPO) models to the same held-out prompts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import Engine, Sampling
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import barrier, gather_by_index, is_rank_zero
from pipeline.evaluation.judge import judged
from pipeline.evaluation.samples import SAMPLES, Sample, read_samples, write_samples
from pipeline.evaluation.user_function import UserFunction

EVALUATION_SEED = 20011


@dataclass(frozen=True)
class Evaluation:
    """The answers of one policy to the held-out prompts, and their grades. A missing kind of grade is None.

    scores: the scores that PPO is trained on
    gold: the grades of a judge, which are never used for training
    function: the reward function's share of the scores, if a reward model scores the answers too
    """

    answers: list[str]
    scores: list[float] | None
    gold: list[float] | None
    function: list[float] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each kind of grade."""
        grades = {"eval_score": self.scores, "eval_function_score": self.function, "gold_score": self.gold}
        return {name: statistics.fmean(values) for name, values in grades.items() if values is not None}


Scorer = Callable[[Sequence[str]], tuple[list[float], list[float] | None]]
"""Maps one answer per held-out prompt to the scores, and to the reward function's share of them (see `Evaluation`)."""


@dataclass(frozen=True)
class Evaluator:
    """Generate and grade the answers of a policy to the held-out prompts. All policies use the same sampling noise.

    judge: returns the gold score; None uses the gold scorer of the demo's prompts
    score: returns the scores that PPO is trained on
    keep: whether the generator's weights and cache remain in memory for the next evaluation
    """

    prompts: Sequence[Prompt]
    tokenizer: ChatTokenizer
    sampling: Sampling
    judge: UserFunction | None = None
    score: Scorer | None = None
    keep: bool = False

    def evaluate(self, engine: Engine) -> Evaluation:
        """Generate and grade the answers of the policy in `engine`."""
        return self.grade(answers_of(engine, self.tokenizer, self.prompts, self.sampling, keep=self.keep))

    def grade(self, answers: Sequence[str]) -> Evaluation:
        """Grade one answer per prompt."""
        scores, function = (None, None) if self.score is None else self.score(answers)
        return Evaluation(list(answers), scores, judged(self.prompts, answers, self.judge), function)


def answers_of(
    engine: Engine, tokenizer: ChatTokenizer, prompts: Sequence[Prompt], sampling: Sampling, *, keep: bool
) -> list[str]:
    """Generate one answer per prompt, distributed over ranks, and return all answers on every rank.

    The sampling noise depends on the index of the prompt, so that every model samples with the same noise. `keep`
    leaves the generator's weights and cache in memory for the next call.
    """
    encoded = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
    with engine.generating(keep=keep) as generator:
        indices = engine.flip.assign([len(ids) for ids in encoded], sampling.max_new_tokens / 2)
        local_prompts = [encoded[index] for index in indices]
        results = generator.generate(local_prompts, sampling, indices, text=tokenizer.decode) if indices else []
    texts = {index: tokenizer.decode(result.token_ids) for index, result in zip(indices, results, strict=True)}
    return gather_by_index(texts)


def compare_models(
    prompts: Sequence[Prompt], folder: Path, own: Evaluation, judge: Callable[[list[str]], Evaluation]
) -> dict[str, Evaluation]:
    """Grade the earlier answers of the base and SFT models again, and return the evaluations of all models by name.

    The function also writes samples.jsonl in `folder`, with the stage's own answers and the earlier ones.
    """
    results = {}
    for name, source in (("base", folder.parent / "sft"), ("sft", folder)):
        answers = earlier_answers(prompts, source, name)
        if answers is not None:
            results[name] = judge(answers)
    results[folder.name] = own
    write_table(prompts, results, folder)
    return results


def earlier_answers(prompts: Sequence[Prompt], folder: Path, name: str) -> list[str] | None:
    """Return a model's answers to the same prompts from samples.jsonl in `folder`; None if any answer is missing."""
    recorded = {sample.prompt: sample.answers.get(name) for sample in read_samples(folder / SAMPLES)}
    answers = [recorded.get(prompt.messages) for prompt in prompts]
    return [answer for answer in answers if answer is not None] if None not in answers else None


def write_table(prompts: Sequence[Prompt], results: Mapping[str, Evaluation], folder: Path) -> None:
    """Write samples.jsonl: one line per prompt with every model's answer, scores and gold score."""
    if is_rank_zero():
        write_samples(
            folder / SAMPLES,
            [
                Sample(
                    prompt.messages,
                    {name: result.answers[i] for name, result in results.items()},
                    {name: result.scores[i] for name, result in results.items() if result.scores is not None},
                    {name: result.gold[i] for name, result in results.items() if result.gold is not None},
                    {name: result.function[i] for name, result in results.items() if result.function is not None},
                )
                for i, prompt in enumerate(prompts)
            ],
        )
    barrier()
