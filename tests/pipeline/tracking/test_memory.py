"""The memory of several engines: the active engine by owner, the others in total, with host and files."""

from types import SimpleNamespace
from typing import Any

from pipeline.tracking.metrics import measured_memory


def engine(now: dict[str, int], heights: dict[str, dict[str, int]], waiting: dict[str, int] | None = None) -> Any:
    return SimpleNamespace(memory_tracker=SimpleNamespace(holdings=lambda: now, peaks=heights, waiting=waiting or {}))


ACTOR = engine({"parameters": 2, "host": 30}, {"train": {"parameters": 2, "activations": 5, "host": 40}})
CRITIC = engine({"parameters": 1, "optimizer": 3, "nvme": 70}, {"train": {"parameters": 1, "gradients": 4, "nvme": 70}})


def test_idle_engines_count_their_resting_bytes() -> None:
    assert measured_memory({"actor": ACTOR, "critic": CRITIC}) == {
        "train actor": {"actor": 2, "critic": 4, "activations": 5, "host": 40, "nvme": 70},
        "train critic": {"actor": 2, "critic": 4, "gradients": 4, "host": 30, "nvme": 70},
    }


def test_kept_forwards_count_while_another_engine_trains() -> None:
    waits = engine({"parameters": 1}, {"train": {"activations": 9}, "score": {"gathered": 1}}, {"activations": 7})
    actual = measured_memory({"actor": ACTOR, "critic": waits})
    assert (actual["train actor"]["activations"], actual["train critic"]["activations"]) == (5 + 7, 9)
    assert measured_memory({"critic": waits, "actor": ACTOR})["train actor"]["activations"] == 5


def test_one_engine_keeps_its_owners() -> None:
    assert measured_memory({"policy": ACTOR}) == ACTOR.memory_tracker.peaks
