"""The work that our engine and DeepSpeed are given alike: the shape, the tokens, the rate, and how memory is read.

Imported in the peer's environment too, so it needs nothing of ours.
"""

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

ROWS, LENGTH = 4, 512  # of the global batch
LEARNING_RATE = 1e-4
MODEL = Path(__file__).resolve().parents[3] / "conf" / "model" / "opt-125m.yaml"


def architecture() -> dict[str, Any]:
    """The fields of the model's transformers configuration."""
    fields: dict[str, Any] = yaml.safe_load(MODEL.read_text(encoding="utf-8"))["architecture"]
    return fields


def rows_of_rank(step: int, rank: int, ranks: int, vocabulary: int) -> Tensor:
    """This rank's token ids of a step: (ROWS / ranks, LENGTH) long."""
    generator = torch.Generator().manual_seed(step)
    # From 4 on: below lie OPT's special ids.
    return torch.randint(4, vocabulary, (ROWS, LENGTH), generator=generator)[rank::ranks]


def run_steps(step: Callable[[int], float], barrier: Callable[[], None], count: int) -> None:
    """Call `step(number)`, which returns its loss, between barriers, and print what came of it as one JSON object."""
    seconds, losses = [], []
    for number in range(count):
        barrier()
        began = time.monotonic()
        losses.append(step(number))
        barrier()
        seconds.append(time.monotonic() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "losses": losses, "peak_bytes": peak}), flush=True)
