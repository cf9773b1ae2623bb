"""The ranks of a run, as pipeline and stages need them: rank 0 writes and reads for all, and results are gathered.

Every function here except `is_rank_zero`, `rank`, `rank_count`, `data_share` and `device` is collective: every rank
calls it. With one rank they return at once. The engine owns the process group and everything about meshes.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from engine import distributed
from pipeline.errors import UserError

T = TypeVar("T")


def is_rank_zero() -> bool:
    """Return True on the one rank that prints and writes files."""
    return distributed.world().is_rank_zero


def rank() -> int:
    """Return the number of this process, from 0."""
    return distributed.world().rank


def rank_count() -> int:
    """Return the number of processes of the run."""
    return distributed.world().size


def data_share() -> tuple[int, int]:
    """Return which share of a global batch this rank works on, and the number of shares.

    Ranks that hold one model between them (tensor, sequence or pipeline parallelism) work on the same share.
    """
    world = distributed.world()
    return world.data_rank, world.data_size


def device() -> torch.device:
    """Return the device of this rank's modules and batches."""
    return distributed.world().device


def barrier() -> None:
    """Wait until every rank has called this."""
    distributed.barrier()


def broadcast_from_rank_zero(value: T) -> T:
    """Return the object that rank 0 passes, on every rank."""
    return cast(T, distributed.broadcast_object(value))


def on_rank_zero(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 only and return its result on every rank, so that data is read and tokenized once.

    Raises on every rank the UserError that `make` raises on rank 0.
    """

    def attempt() -> tuple[T | None, str | None]:
        try:
            return make(), None
        except UserError as problem:
            return None, str(problem)

    result, problem = distributed.run_on_rank_zero(attempt)
    if problem is not None:
        raise UserError(problem)
    return cast(T, result)


def gather_objects(value: Any) -> list[Any]:
    """Return the objects of all ranks in rank order, on every rank."""
    return distributed.gather_objects(value)


def gather_by_index(results: Mapping[int, T]) -> list[T]:
    """Return the results of all ranks in the order of their indices 0, 1, ..., on every rank.

    Ranks that work on the same share of the data return equal results for it.
    """
    found = {index: result for part in distributed.gather_objects(results) for index, result in part.items()}
    return [found[index] for index in range(len(found))]


def sum_over_ranks(value: float) -> float:
    """Return the sum of one number per share of the data, in float64."""
    return distributed.sum_over_ranks({"value": value})["value"]
