"""`checkpoint`: the delay that a save causes in the training loop, as a share of the save's seconds.

The model has the shape of OPT-125M and runs on one rank. First, steps run without a save. Then a save begins, and steps
run until all files are written: these seconds are `whole`. The delay has two parts. `call` is the duration of the call
of `save`. `slower` is the time that the concurrent steps took in excess of as many steps without a save, from copies
that precede a change of unwritten values and from shared cores. `call_share` leaves `slower` out. `save_alone` is a
save without training.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import median
from benchmarks.record import Result
from benchmarks.zero.deepspeed_work import architecture
from engine import Checkpointer, Engine, EngineConfig, OptimizerConfig, initialize

ROWS, LENGTH, STEPS_ALONE = 2, 64, 6


def measure(rounds: int) -> Result:
    """Return the median over `rounds` saves."""
    engine = _engine()
    ids = torch.randint(0, 1000, (ROWS, LENGTH))
    with tempfile.TemporaryDirectory(prefix="zerochat-checkpoint-") as folder:
        _save(engine, ids, Path(folder) / "step-0")  # allocates the buffers
        runs = [_save(engine, ids, Path(folder) / f"step-{number + 1}") for number in range(rounds)]
    detail = {name: median([run[name] for run in runs]) for name in runs[0]}
    share = median([(run["call"] + run["slower"]) / run["whole"] for run in runs])
    return Result("zero", "checkpoint", share, "share of the save's time", lower_is_better=True, detail=detail)


def _save(engine: Engine, ids: Tensor, folder: Path) -> dict[str, float]:
    """Save once during training; return the seconds of the save's parts and of the steps."""
    checkpointer = Checkpointer({"engine": engine})
    start = time.perf_counter()
    checkpointer.save(folder.with_name("alone"), {})
    checkpointer.wait()
    save_alone = time.perf_counter() - start
    step_alone = median([_step(engine, ids) for _ in range(STEPS_ALONE)])
    start = time.perf_counter()
    checkpointer.save(folder, {})
    call = time.perf_counter() - start
    concurrent: list[float] = []
    with ThreadPoolExecutor(1) as thread:  # the last file may be complete in the middle of a step
        end = thread.submit(_end_of_save, checkpointer)
        while not end.done():
            concurrent.append(_step(engine, ids))
    total = end.result() - start
    size = sum(file.stat().st_size for file in folder.iterdir())
    slower = max(0.0, sum(concurrent) - len(concurrent) * step_alone)
    figures = {"call": call, "slower": slower, "whole": total, "save_alone": save_alone, "call_share": call / total}
    figures |= {"step_alone": step_alone, "steps_beside": float(len(concurrent)), "first_step_beside": concurrent[0]}
    return figures | {"gigabytes": size / 1e9, "cores": float(os.cpu_count() or 1)}


def _end_of_save(checkpointer: Checkpointer) -> float:
    """Return the time at which the last file is written."""
    checkpointer.wait()
    return time.perf_counter()


def _engine() -> Engine:
    config = AutoConfig.for_model(**architecture())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)

    return initialize(model, EngineConfig(dtype="fp32"), optimizer=OptimizerConfig(lr=1e-4), fill=fill)


def _step(engine: Engine, ids: Tensor) -> float:
    start = time.perf_counter()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return time.perf_counter() - start
