"""What one rank can't do stops all of them, with its reason."""

import errno
from collections.abc import Callable
from typing import TypeVar

from engine.parallel import dist

Made = TypeVar("Made")


def together(make: Callable[[], Made]) -> Made:
    """`make()`, on every rank. Raises OSError on all of them where it raises one on any."""
    made: list[Made] = []
    problem: OSError | None = None
    try:
        made.append(make())
    except OSError as error:
        problem = error
    for told in dist.gather_objects(str(problem) if problem else None):
        if told:
            raise problem or OSError(errno.ENOSPC, f"another rank: {told}")
    return made[0]
