"""What answers score: by the reward model, by a person's own function, or by both."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from engine import Engine
from engine.healing import Portion
from engine.parallel import dist
from pipeline.data.records import Row
from pipeline.errors import SharedError, UserError
from pipeline.reward_function import RewardFunction
from step3_ppo.models import Models
from step3_ppo.rows import Rows, end_scores

Call = tuple[str, Row]
"""What a reward function is called with: an answer's text, and the row of the data that its prompt comes from."""


@dataclass(frozen=True)
class Scores:
    """What answers score in all, and the reward function's part of it; None where one of the two scores alone."""

    total: list[float]
    function: list[float] | None = None


def score_answers(models: Models, batches: Sequence[Portion[Rows]], calls: Sequence[Call]) -> Scores:
    """By the reward model, by the reward function, or by both: of all sequences, on every rank."""
    given = None if models.function is None else function_scores(models.function, calls)
    if models.reward is None:
        assert given is not None, "nothing scores"
        return Scores(given)
    found = model_scores(models.reward, batches, models.reward_mean)
    if given is None:
        return Scores(found)
    return Scores([one + other for one, other in zip(found, given, strict=True)], given)


def model_scores(reward: Engine, batches: Sequence[Portion[Rows]], mean: float) -> list[float]:
    """Scores of all sequences less `mean`, on every rank."""

    def centred(module: nn.Module, batch: Rows) -> list[tuple[int, Tensor]]:
        return list(zip(batch.places, (end_scores(module, batch) - mean).unbind(), strict=False))

    return _in_order({place: score.item() for place, score in chain.from_iterable(reward.score(batches, centred))})


def function_scores(function: RewardFunction, calls: Sequence[Call]) -> list[float]:
    """What a function gives for each call, the calls spread over ranks; all of it on every rank.

    Raises SharedError where a call fails on any rank.
    """
    world = dist.world()
    places = range(world.rank, len(calls), world.size)
    mine: dict[int, float] = {}
    failure: UserError | None = None
    try:
        mine = dict(zip(places, function.scores([calls[place] for place in places]), strict=True))
    except UserError as problem:
        failure = problem
    said = [text for text in dist.gather_objects(None if failure is None else str(failure)) if text is not None]
    if said:
        raise SharedError(said[0]) from failure
    return _in_order(mine)


def _in_order(mine: dict[int, float]) -> list[float]:
    """Every rank's scores by place -> all of them."""
    found = {place: score for part in dist.gather_objects(mine) for place, score in part.items()}
    return [found[place] for place in range(len(found))]
