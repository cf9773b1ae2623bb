"""The held-out prompts that base, SFT and PPO (or DPO) model all answer, and what came out: samples.jsonl."""

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
    """The answers of one policy to the held-out prompts, and their grades. A grade that nobody gave is None.

    scores: what PPO is trained on
    gold: the grades of a judge, which trains nothing
    function: the part of the reward function, if a reward model scores as well
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
"""Answers, one for each held-out prompt -> their scores, and the part of the reward function (see `Evaluation`)."""


@dataclass(frozen=True)
class Evaluator:
    """Generates and grades the answers of a policy to the held-out prompts, with the same noise for every policy.

    judge: gives the gold score; None uses the gold scorer of the demo's prompts
    score: gives the scores that PPO is trained on
    keep: holds the weights and the cache of the generator for the next evaluation
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
        """Grade given answers, one for each prompt."""
        scores, function = (None, None) if self.score is None else self.score(answers)
        return Evaluation(list(answers), scores, judged(self.prompts, answers, self.judge), function)


def answers_of(
    engine: Engine, tokenizer: ChatTokenizer, prompts: Sequence[Prompt], how: Sampling, *, keep: bool
) -> list[str]:
    """Answers to prompts, all on every rank, the work spread over ranks. The noise belongs to the prompt's place, so
    that every model that answers meets the same.

    `keep` holds the generator's weights and cache for the next time.
    """
    asked = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
    with engine.generating(keep=keep) as rollouts:
        places = engine.flip.assign([len(ids) for ids in asked], how.max_new_tokens / 2)
        to_answer = [asked[place] for place in places]
        mine = rollouts.generate(to_answer, how, places, text=tokenizer.decode) if places else []
    return gather_by_index({place: tokenizer.decode(made.token_ids) for place, made in zip(places, mine, strict=True)})


def compare_models(
    prompts: Sequence[Prompt], folder: Path, own: Evaluation, judge: Callable[[list[str]], Evaluation]
) -> dict[str, Evaluation]:
    """A stage's own answers beside those of base and SFT model, which are judged again: in samples.jsonl of its folder,
    and by model.
    """
    results = {}
    for name, where in (("base", folder.parent / "sft"), ("sft", folder)):
        answers = earlier_answers(prompts, where, name)
        if answers is not None:
            results[name] = judge(answers)
    results[folder.name] = own
    write_table(prompts, results, folder)
    return results


def earlier_answers(prompts: Sequence[Prompt], folder: Path, name: str) -> list[str] | None:
    """What a model answered to these very prompts in an earlier stage; None unless all are there."""
    known = {sample.prompt: sample.answers.get(name) for sample in read_samples(folder / SAMPLES)}
    answers = [known.get(prompt.messages) for prompt in prompts]
    return [a for a in answers if a is not None] if all(a is not None for a in answers) else None


def write_table(prompts: Sequence[Prompt], results: Mapping[str, Evaluation], folder: Path) -> None:
    """samples.jsonl: each prompt with every model's answer, scores and gold score."""
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
