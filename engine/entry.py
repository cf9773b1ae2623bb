"""`engine.initialize`: any module becomes an engine, told by an `EngineConfig` or by a DeepSpeed configuration."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from engine.config import EngineConfig, OptimizerConfig
from engine.engine import Engine
from engine.parallel import dist


def initialize(
    model: nn.Module,
    config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    optimizer: OptimizerConfig | None = None,
    scheduler: Callable[[int], float] | None = None,
    fill: Callable[[nn.Module], None] | None = None,
    rollout_path: str | None = None,
) -> Engine:
    """Lay `model` out over the ranks, in place, and give it an optimizer.

    `config` is an `EngineConfig`, or a DeepSpeed configuration as a dictionary or a JSON file; then `optimizer` and
    `scheduler` fill in what the file leaves open ("auto" or absent). `optimizer=None` without one in the file makes a
    frozen engine that only computes. `scheduler` maps the optimizer step (from 0) to its learning rate.

    `fill(module)` gives values to a module built on the meta device, after it was sharded. `rollout_path` names the
    submodule that generates text, for `generating` ("" is the model itself). Joins the process group that the
    environment names (torchrun), else runs alone. Raises ValueError, saying what to do, for what can't be.
    """
    if config is None or isinstance(config, EngineConfig):
        return Engine(
            model,
            config or EngineConfig(),
            optimizer=optimizer,
            scheduler=scheduler,
            fill=fill,
            rollout_path=rollout_path,
        )
    from engine.deepspeed import read

    choices = read(config, ranks=dist.world().size, optimizer=optimizer)
    if dist.world().leads:
        for line in choices.notes:
            print(f"engine: {line}", flush=True)
    return Engine(
        model,
        choices.engine,
        optimizer=choices.optimizer,
        scheduler=choices.scheduler or scheduler,
        betas=choices.betas,
        fill=fill,
        rollout_path=rollout_path,
    )
