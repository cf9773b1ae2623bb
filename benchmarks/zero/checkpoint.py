"""`checkpoint`: what a save costs the training loop, as a share of the save's own time; OPT-125M shape, one rank.

Steps run alone, then a save is begun and steps go on until it is on disk: that is the save's own time. Held up are the
call itself, and what the steps beside the writing took longer than as many steps alone (their median): copies made
before the first of them changes what is not yet written, and cores shared with the writing. `call_share` leaves the
latter out; `save_alone` is a save that nobody trains beside.
"""

import os
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import median
from benchmarks.record import ROOT, Result
from engine import Checkpointer, Engine, EngineConfig, OptimizerConfig, initialize

ROWS, LENGTH, ALONE = 2, 64, 6


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
    checkpointer = Checkpointer({"engine": engine})
    began = time.perf_counter()
    checkpointer.save(folder.with_name("alone"), {})
    checkpointer.wait()
    save_alone = time.perf_counter() - began
    alone = median([_step(engine, ids) for _ in range(ALONE)])
    began = time.perf_counter()
    checkpointer.save(folder, {})
    call = time.perf_counter() - began
    ended = _when_done(checkpointer)
    beside: list[float] = []
    while not checkpointer.done:
        beside.append(_step(engine, ids))
    checkpointer.wait()
    whole = ended.result() - began
    size = sum(file.stat().st_size for file in folder.iterdir())
    slower = max(0.0, sum(beside) - len(beside) * alone)
    figures = {"call": call, "slower": slower, "whole": whole, "save_alone": save_alone, "call_share": call / whole}
    figures |= {"step_alone": alone, "steps_beside": float(len(beside)), "first_step_beside": beside[0]}
    return figures | {"gigabytes": size / 1e9, "cores": float(os.cpu_count() or 1)}


def _when_done(checkpointer: Checkpointer) -> "Future[float]":
    """The moment at which nothing is left to write, which may be in the middle of a step."""
    ended: Future[float] = Future()

    def look() -> None:
        while not checkpointer.done:
            time.sleep(0.01)
        ended.set_result(time.perf_counter())

    threading.Thread(target=look).start()
    return ended


def _engine() -> Engine:
    config = AutoConfig.for_model(**_shape())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)

    return initialize(model, EngineConfig(dtype="fp32"), optimizer=OptimizerConfig(lr=1e-4), fill=fill)


def _shape() -> dict[str, Any]:
    text = (ROOT / "conf" / "model" / "opt-125m.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text)["architecture"])


def _step(engine: Engine, ids: Tensor) -> float:
    began = time.perf_counter()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return time.perf_counter() - began
