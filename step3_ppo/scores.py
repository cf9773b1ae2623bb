"""What answers score: by the reward model, by a person's own function, or by both."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from engine import Engine
from pipeline.distributed import gather_by_index
from pipeline.evaluation.judge import Call, function_scores
from step3_ppo.models import Models
from step3_ppo.rows import Rows, end_scores


@dataclass(frozen=True)
class Scores:
    """What answers score in all, and the reward function's part of it; None where one of the two scores alone."""

    total: list[float]
    function: list[float] | None = None


def score_answers(models: Models, batches: Sequence[Rows], calls: Sequence[Call]) -> Scores:
    """By the reward model, by the reward function, or by both: of all sequences, on every rank."""
    given = None if models.function is None else function_scores(models.function, calls)
    if models.reward is None:
        assert given is not None, "nothing scores"
        return Scores(given)
    found = model_scores(models.reward, batches, models.reward_mean)
    if given is None:
        return Scores(found)
    return Scores([one + other for one, other in zip(found, given, strict=True)], given)


def model_scores(reward: Engine, batches: Sequence[Rows], mean: float) -> list[float]:
    """Scores of all sequences less `mean`, on every rank."""

    def centred(module: nn.Module, batch: Rows) -> list[tuple[int, Tensor]]:
        scores = (end_scores(module, batch) - mean).unbind()
        return list(zip(batch.places, scores, strict=True)) if batch.places else []

    return gather_by_index(
        {place: score.item() for place, score in chain.from_iterable(reward.score(batches, centred))}
    )
