"""Memory that a stage used: this rank's bytes by owner and phase, and its peak."""

import resource
import sys
from collections import Counter
from collections.abc import Mapping

import torch

from engine import Engine
from pipeline.distributed import device, rank

RESTING = ("parameters", "optimizer", "average")  # owners that an engine holds between steps
SHARED_PHASES = ("generate", "score")  # phases with the same name for all engines
# Owners that an engine may hold while another engine works: offloaded bytes, and what it generates with.
HELD_MEANWHILE = ("host", "nvme", "inference_model", "prepacked_linears", "cache")


def measured_memory(engines: Mapping[str, Engine]) -> dict[str, dict[str, int]]:
    """Return this rank's bytes by owner at the peak of each phase.

    With one engine, phases and owners are those of its tracker. With several engines, a phase is "train actor", and the
    bytes that an engine holds between steps have its name as the owner. While one engine trains, forwards of the
    engines after it may wait for their backward.
    """
    if len(engines) == 1:
        (engine,) = engines.values()
        return {phase: dict(owners) for phase, owners in engine.memory_tracker.peaks.items()}
    holdings = {name: engine.memory_tracker.holdings() for name, engine in engines.items()}
    resting = {name: sum(owners.get(owner, 0) for owner in RESTING) for name, owners in holdings.items()}
    found: dict[str, dict[str, int]] = {}
    for index, (name, engine) in enumerate(engines.items()):
        others = Counter[str]()
        for other, owners in holdings.items():
            if other != name:
                others.update({owner: owners[owner] for owner in HELD_MEANWHILE if owners.get(owner)})
        waiting = Counter[str]()
        for later in [*engines.values()][index + 1 :]:
            waiting.update(later.memory_tracker.waiting)
        for phase, owners in engine.memory_tracker.peaks.items():
            sizes = Counter({owner: size for owner, size in owners.items() if owner not in RESTING})
            sizes.update(others)
            if phase == "train":
                sizes.update(waiting)
            label = phase if phase in SHARED_PHASES else f"{phase} {name}"
            peaks = found.setdefault(label, dict(resting))
            for owner, size in sizes.items():
                peaks[owner] = max(size, peaks.get(owner, 0))
    return found


def peak_memory() -> dict[str, int]:
    """Return this rank's peak: bytes on the device (allocated by torch) and resident on the host."""
    device_bytes = torch.cuda.max_memory_allocated() if device().type == "cuda" else 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    host_bytes = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rank": rank(), "device_bytes": device_bytes, "host_bytes": host_bytes}
