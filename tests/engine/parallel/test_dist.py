"""The process group: restarted ranks on the store of their first start."""

import os
import time

import pytest

from engine.parallel import dist
from tests.ranks import run_ranks


def sum_after_restart() -> float:
    """Start the ranks again on the store of the first start, as torchrun does after a failure.

    Rank 1 starts later, so that rank 0 would read the address from rank 1's first start.
    """
    late = dist.world().rank == 1
    dist.stop()
    time.sleep(late)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    dist.start("test", device="cpu")
    return dist.sum_over_ranks({"rank": float(dist.world().rank + 1)})["rank"]


def test_restarted_ranks_ignore_the_keys_of_the_first_attempt() -> None:
    assert run_ranks(sum_after_restart, 2) == [pytest.approx(3.0)] * 2
