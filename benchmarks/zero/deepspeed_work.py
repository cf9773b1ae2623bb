"""The work that both sides of the DeepSpeed comparison do: model shape, tokens, learning rate, and measurement.

DeepSpeed's environment imports this file too. It must not import the engine or the pipeline.
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
MODELS = Path(__file__).resolve().parents[2] / "conf" / "model"


def architecture(model: str = "opt-125m") -> dict[str, Any]:
    """Return the fields of the transformers configuration in conf/model/`model`.yaml."""
    fields: dict[str, Any] = yaml.safe_load((MODELS / f"{model}.yaml").read_text(encoding="utf-8"))["architecture"]
    return fields


def rows_of_rank(step: int, rank: int, ranks: int, vocabulary: int) -> Tensor:
    """Return this rank's token ids of a step, (ROWS / ranks, LENGTH)."""
    generator = torch.Generator().manual_seed(step)
    # The ids 0 to 3 are special tokens of OPT.
    return torch.randint(4, vocabulary, (ROWS, LENGTH), generator=generator)[rank::ranks]


def run_steps(step: Callable[[int], float], barrier: Callable[[], None], count: int) -> None:
    """Call `step(number)` `count` times between barriers. Print seconds, losses and peak bytes as one JSON object.

    `step` returns the loss.
    """
    seconds, losses = [], []
    for number in range(count):
        barrier()
        start = time.monotonic()
        losses.append(step(number))
        barrier()
        seconds.append(time.monotonic() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "losses": losses, "peak_bytes": peak}), flush=True)
