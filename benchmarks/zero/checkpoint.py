"""`checkpoint`: what a save costs the training loop, as a share of the save's own time; OPT-125M shape, one rank.

Steps run alone, then a save is begun and steps go on until it is on disk. Held up are the call itself (the copies) and
what the steps beside the writing took longer than those alone. Writing shares the cores with training: on a machine of
two cores that is seen, on one with cores to spare it is not.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import median
from benchmarks.record import Result
from engine import Checkpointer, Engine, EngineConfig, OptimizerConfig, initialize
from engine.memory.shapes import shape_of

ROWS, LENGTH, ALONE = 2, 64, 4


def measure(rounds: int) -> Result:
    """The median over `rounds` saves."""
    engine = _engine()
    ids = torch.randint(0, 1000, (ROWS, LENGTH))
    with tempfile.TemporaryDirectory(prefix="zerochat-checkpoint-") as place:
        _held(engine, ids, Path(place) / "step-0")  # buffers are allocated once
        runs = [_held(engine, ids, Path(place) / f"step-{number + 1}") for number in range(rounds)]
    detail = {name: median([run[name] for run in runs]) for name in runs[0]}
    share = median([(run["call"] + run["slower"]) / run["whole"] for run in runs])
    return Result("zero", "checkpoint", share, "share of the save's time", lower_is_better=True, detail=detail)


def _held(engine: Engine, ids: Tensor, folder: Path) -> dict[str, float]:
    """Seconds: the call, the whole save, and what the steps beside it took more than alone."""
    alone = min(_step(engine, ids) for _ in range(ALONE))
    checkpointer = Checkpointer({"engine": engine})
    began = time.perf_counter()
    checkpointer.save(folder, {})
    call = time.perf_counter() - began
    beside: list[float] = []
    while not checkpointer.done:
        beside.append(_step(engine, ids))
    checkpointer.wait()
    whole = time.perf_counter() - began
    size = sum(file.stat().st_size for file in folder.iterdir())
    slower = sum(max(0.0, seconds - alone) for seconds in beside)
    figures = {"call": call, "whole": whole, "slower": slower, "step_alone": alone, "steps_beside": float(len(beside))}
    return figures | {"gigabytes": size / 1e9, "cores": float(os.cpu_count() or 1)}


def _engine() -> Engine:
    config = AutoConfig.for_model(**_shape())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)

    return initialize(model, EngineConfig(dtype="fp32"), optimizer=OptimizerConfig(lr=1e-4), fill=fill)


def _shape() -> dict[str, Any]:
    return {**shape_of("opt-125m").config.to_dict(), "model_type": "opt"}


def _step(engine: Engine, ids: Tensor) -> float:
    began = time.perf_counter()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return time.perf_counter() - began
