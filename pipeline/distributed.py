"""Functions for several ranks: rank 0 reads and writes files for all ranks, and results are gathered.

Every function except `is_rank_zero`, `rank`, `rank_count`, `data_share` and `device` is collective: every rank calls
it. The engine owns the process group and the meshes.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from engine import distributed
from pipeline import progress
from pipeline.errors import UserError

T = TypeVar("T")


def is_rank_zero() -> bool:
    """Return whether this is rank 0, which prints and writes files."""
    return distributed.world().is_rank_zero


def rank() -> int:
    """Return the number of this process, from 0."""
    return distributed.world().rank


def rank_count() -> int:
    """Return the number of processes of the run."""
    return distributed.world().size


def data_share() -> tuple[int, int]:
    """Return the index of this rank's share of a global batch, and the number of shares.

    Ranks that split one model (tensor, sequence or pipeline parallelism) have the same share.
    """
    world = distributed.world()
    return world.data_rank, world.data_size


def device() -> torch.device:
    """Return the device of this rank's modules and batches."""
    return distributed.world().device


def barrier() -> None:
    """Wait until every rank has called this function."""
    distributed.barrier()


def broadcast_from_rank_zero(value: T) -> T:
    """Return the object that rank 0 passes, on every rank."""
    return cast(T, distributed.broadcast_object(value))


def on_rank_zero(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on every rank, so that data is read and tokenized once.

    If `make` raises UserError on rank 0, every rank raises it.
    """

    def attempt() -> tuple[T | None, str | None]:
        try:
            with progress.own().alone():
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

    Ranks with the same share of the data must pass equal results.
    """
    gathered = {index: result for local in distributed.gather_objects(results) for index, result in local.items()}
    return [gathered[index] for index in range(len(gathered))]


def gather_rows(rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the fp32 tensors (n,) of all ranks by index, on every rank. Each rank sends one tensor.

    The rows of a rank usually share memory, and the pickle of each row would contain all of this memory.
    """
    lengths = {index: len(row) for index, row in rows.items()}
    gathered: dict[int, Tensor] = {}
    for sizes, values in distributed.gather_objects((lengths, torch.cat([torch.empty(0), *rows.values()]))):
        gathered |= dict(zip(sizes, values.split(list(sizes.values())), strict=True))
    return gathered


def sum_over_ranks(value: float) -> float:
    """Return the sum of one number per share of the data, in float64."""
    return distributed.sum_over_ranks({"value": value})["value"]
