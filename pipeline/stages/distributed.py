"""What the first rank makes for all ranks, and what each makes a part of."""

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from engine.parallel import dist
from pipeline.errors import UserError

Made = TypeVar("Made")


def by_first_rank(make: Callable[[], Made]) -> Made:
    """What the first rank makes, on every rank; so data is read, checked and tokenized once. A UserError of the first
    rank is raised on every rank.
    """

    def tried() -> tuple[Made | None, str | None]:
        try:
            return make(), None
        except UserError as problem:
            return None, str(problem)

    made, problem = dist.from_first(tried)
    if problem is not None:
        raise UserError(problem)
    return cast(Made, made)


def in_order(mine: Mapping[int, Made]) -> list[Made]:
    """Each rank's results by place -> those of places 0, 1, ... on every rank. Ranks that share a place agree on it."""
    found = {place: result for part in dist.gather_objects(mine) for place, result in part.items()}
    return [found[place] for place in range(len(found))]
