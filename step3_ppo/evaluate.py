"""Held-out prompts: what the policy answers, what it scores and what the gold scorer says."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine import Sampling
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.evaluator import Evaluation, answers_of
from pipeline.evaluation.judge import Call, judged
from pipeline.evaluation.user_function import UserFunction
from step3_ppo.models import Models
from step3_ppo.rows import my_rows
from step3_ppo.scores import score_answers


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
    judged_by: UserFunction | None = None

    def examine(self, models: Models) -> Evaluation:
        """Answers of the actor as it is now."""
        answers = answers_of(models.actor, self.tokenizer, self.prompts, self.sampling, keep=self.keep)
        return self.judge(models, answers)

    def judge(self, models: Models, answers: Sequence[str]) -> Evaluation:
        """Score given answers, as text: whoever wrote them, an end token is taken as given."""
        prompts = [self.tokenizer.encode_prompt(p.messages) for p in self.prompts]
        responses = [self.tokenizer.encode_answer(answer) for answer in answers]
        batches = my_rows(
            prompts, responses, range(len(prompts)), self.tokenizer.pad_id, self.budget, packing=models.pack
        )
        scores = score_answers(models, batches, self._calls(answers))
        return Evaluation(list(answers), scores.total, judged(self.prompts, answers, self.judged_by), scores.function)

    def _calls(self, answers: Sequence[str]) -> list[Call]:
        """What a reward function is called with; prompts keep their rows for it alone."""
        asked = zip(self.prompts, answers, strict=True)
        return [(answer, prompt.row) for prompt, answer in asked if prompt.row is not None]
