"""Held-out prompts: what the policy answers, what it scores and what the gold scorer says, beside base and SFT."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import Sampling
from engine.parallel import dist
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.insight.evaluate import Sample, read_samples, write_samples
from pipeline.judging import Call, judged
from pipeline.own_function import OwnFunction
from pipeline.stage import answers_of
from step3_ppo.models import Models
from step3_ppo.rows import my_rows
from step3_ppo.scores import score_answers


@dataclass(frozen=True)
class HeldOut:
    """One policy's answers to the held-out prompts; gold is None where nobody can judge, function where the reward
    function does not score beside a reward model.
    """

    answers: list[str]
    scores: list[float]
    gold: list[float] | None
    function: list[float] | None = None

    @property
    def figures(self) -> dict[str, float]:
        found = {"eval_score": statistics.fmean(self.scores)}
        if self.function is not None:
            found["eval_function_score"] = statistics.fmean(self.function)
        if self.gold is not None:
            found["gold_score"] = statistics.fmean(self.gold)
        return found


@dataclass(frozen=True)
class Examiner:
    """Puts the same prompts, with the same noise, to any policy; `keep` holds the generator between two times.

    `judged_by` gives the gold score, where that is a person's own function.
    """

    prompts: list[Prompt]
    tokenizer: ChatTokenizer
    sampling: Sampling
    budget: int
    keep: bool
    judged_by: OwnFunction | None = None

    def examine(self, models: Models) -> HeldOut:
        """Answers of the actor as it is now."""
        answers = answers_of(models.actor, self.tokenizer, self.prompts, self.sampling, keep=self.keep)
        return self.judge(models, answers)

    def judge(self, models: Models, answers: Sequence[str]) -> HeldOut:
        """Score given answers, as text: whoever wrote them, an end token is taken as given."""
        prompts = [self.tokenizer.encode_prompt(p.messages) for p in self.prompts]
        responses = [self.tokenizer.encode_answer(answer) for answer in answers]
        batches = my_rows(
            prompts, responses, range(len(prompts)), self.tokenizer.pad_id, self.budget, packing=models.pack
        )
        scores = score_answers(models, batches, self._calls(answers))
        return HeldOut(list(answers), scores.total, judged(self.prompts, answers, self.judged_by), scores.function)

    def _calls(self, answers: Sequence[str]) -> list[Call]:
        """What a reward function is called with; prompts keep their rows for it alone."""
        asked = zip(self.prompts, answers, strict=True)
        return [(answer, prompt.row) for prompt, answer in asked if prompt.row is not None]


def earlier_answers(prompts: Sequence[Prompt], folder: Path, name: str) -> list[str] | None:
    """What a model answered to these very prompts in an earlier stage; None unless all are there."""
    known = {sample.prompt: sample.answers.get(name) for sample in read_samples(folder / "samples.jsonl")}
    answers = [known.get(prompt.messages) for prompt in prompts]
    return [a for a in answers if a is not None] if all(a is not None for a in answers) else None


def write_table(prompts: Sequence[Prompt], results: Mapping[str, HeldOut], folder: Path) -> None:
    """samples.jsonl: each prompt with every model's answer, scores and gold score."""
    if dist.world().leads:
        write_samples(
            folder / "samples.jsonl",
            [
                Sample(
                    prompt.messages,
                    {name: result.answers[i] for name, result in results.items()},
                    {name: result.scores[i] for name, result in results.items()},
                    {name: result.gold[i] for name, result in results.items() if result.gold is not None},
                    {name: result.function[i] for name, result in results.items() if result.function is not None},
                )
                for i, prompt in enumerate(prompts)
            ],
        )
    dist.barrier()
