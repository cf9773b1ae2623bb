"""What a stage held in memory: this rank's bytes by owner and phase, and its peak."""

import resource
import sys
from collections.abc import Mapping

import torch

from engine import Engine
from pipeline.distributed import device, rank

RESTING = ("parameters", "optimizer", "average")  # owners of what is held between steps
HELD = ("inference_model", "prepacked_linears", "cache")  # what an engine generates with, and may keep
ALONE = ("generate", "score")  # phases that are one, whichever engine is at work
ELSEWHERE = ("host", "nvme")  # of which all engines have theirs at once


def measured_memory(engines: Mapping[str, Engine]) -> dict[str, dict[str, int]]:
    """This rank's bytes by owner at the height of each phase; beside a working engine the others rest.

    With one engine phases and owners are those of the prediction; with several a phase is "train actor", and what an
    engine keeps between steps has its name. While one trains, forwards of those that train after it may wait.
    """
    found: dict[str, dict[str, int]] = {}
    now = {name: engine.memory_tracker.holdings() for name, engine in engines.items()}
    resting = {name: sum(owners.get(o, 0) for o in RESTING) for name, owners in now.items()}
    for place, (name, engine) in enumerate(engines.items()):
        waiting = [other.memory_tracker.waiting for other in [*engines.values()][place + 1 :]]
        for phase, owners in engine.memory_tracker.peaks.items():
            if len(engines) == 1:
                found[phase] = dict(owners)
                continue
            working = {owner: count for owner, count in owners.items() if owner not in RESTING}
            for owner in (*ELSEWHERE, *HELD):
                others = sum(owners.get(owner, 0) for other, owners in now.items() if other != name)
                if others:
                    working[owner] = working.get(owner, 0) + others
            for owner, count in (each for held in waiting for each in held.items()) if phase == "train" else ():
                working[owner] = working.get(owner, 0) + count
            label = phase if phase in ALONE else f"{phase} {name}"
            before = found.setdefault(label, dict(resting))
            found[label] = before | {owner: max(count, before.get(owner, 0)) for owner, count in working.items()}
    return found


def peak_memory() -> dict[str, int]:
    """This rank's peak: bytes on the device (allocated by torch) and resident on the host."""
    device_bytes = torch.cuda.max_memory_allocated() if device().type == "cuda" else 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    host_bytes = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rank": rank(), "device_bytes": device_bytes, "host_bytes": host_bytes}
