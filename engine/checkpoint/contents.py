"""What a checkpoint has of an engine: tensors by name, and numbers; and how they go back."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine import optim
from engine.average import Average
from engine.buffers import persistent_buffers
from engine.checkpoint import offloaded
from engine.checkpoint.chunks import in_chunks, telling_its_chunks
from engine.compression.onebit_adam import ERRORS
from engine.config import OptimizerConfig
from engine.offload import OffloadedOptimizer
from engine.offload.optimizer import OffloadedState
from engine.parallel import dist
from engine.precision import LossScaler

PARAMETER, AVERAGE, BUFFER = "parameter.", "average.", "buffer."


class Trained(Protocol):
    """What a checkpoint asks of an engine."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | OffloadedOptimizer | None
    optimizer_config: OptimizerConfig | None
    average: Average
    scaler: LossScaler
    step_count: int
    before_change: list[Callable[[], None]]

    def about_to_change(self) -> None:
        """Let those know who read parameters or states beside training."""
        ...


def tensors(engine: Trained) -> dict[str, Tensor]:
    """What is trained, its optimizer's tensors and the module's buffers, by name; loading writes into these tensors."""
    assert engine.optimizer is not None
    buffers = {f"{BUFFER}{name}": buffer for name, buffer in persistent_buffers(engine.module).items()}
    if isinstance(engine.optimizer, OffloadedOptimizer):
        return _told(offloaded.tensors(engine.optimizer)[0]) | buffers
    trained = {f"{PARAMETER}{n}": p.detach() for n, p in engine.module.named_parameters() if p.requires_grad}
    moments = {name: tensor for name, tensor in optim.states(engine.module, engine.optimizer) if tensor.ndim}
    averages = {f"{AVERAGE}{name}": mean for name, mean in engine.average.tensors.items()}
    return _told(trained | moments | averages) | buffers


def wanted(tensors: dict[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """What to read. 1-bit Adam's errors belong to a number of ranks; at another one they begin at zero again."""
    anew = {name for name in tensors if name.startswith(ERRORS) and name not in saved["moments"]}
    for name in anew:
        tensors[name].zero_()
    return {name: tensor for name, tensor in tensors.items() if name not in anew}


def filed(engines: Mapping[str, Trained]) -> dict[str, OffloadedState]:
    """The states of all engines that are in files, by their names in the checkpoint."""
    return {
        f"{name}.{state}": place
        for name, engine in engines.items()
        if isinstance(engine.optimizer, OffloadedOptimizer)
        for state, place in offloaded.tensors(engine.optimizer)[1].items()
    }


def scalars(engine: Trained) -> dict[str, Any]:
    """What goes into JSON: counters, and numbers of the optimizer's state."""
    assert engine.optimizer is not None
    if isinstance(engine.optimizer, OffloadedOptimizer):
        moments = [name for name, state in engine.optimizer.states().items() if state.is_moment]
        numbers = engine.optimizer.scalars()
    else:
        found = dict(optim.states(engine.module, engine.optimizer))
        moments = [name for name, tensor in found.items() if tensor.ndim]
        numbers = {name: tensor.item() for name, tensor in found.items() if not tensor.ndim}
    return {
        "step_count": engine.step_count,
        "scaler": engine.scaler.state(),
        "moments": moments,
        "numbers": numbers,
    }


def all_scalars(engine: Trained) -> dict[str, Any]:
    """`scalars` of the whole model: ranks of a pipeline name the states of their piece. Every rank calls."""
    mine = scalars(engine)
    if dist.world().pipeline == 1:
        return mine
    parts = dist.gather_objects(mine)
    moments = list(dict.fromkeys(name for part in parts for name in part["moments"]))
    return mine | {"moments": moments, "numbers": {n: value for part in parts for n, value in part["numbers"].items()}}


def difference(engine: Trained, saved: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> str | None:
    """Why a checkpoint with these scalars and shapes is not this engine's; None where it is."""
    assert engine.optimizer_config is not None
    trained = {f"{PARAMETER}{n}": p.shape for n, p in engine.module.named_parameters() if p.requires_grad}
    here = trained | {f"{BUFFER}{name}": buffer.shape for name, buffer in persistent_buffers(engine.module).items()}
    for name, shape in here.items():
        if name not in shapes:
            return f"it has no {name}"
        if shapes[name] != shape:
            return f"{name} has shape {tuple(shapes[name])} there, and {tuple(shape)} here"
    for name in shapes if dist.world().pipeline == 1 else ():
        if name.startswith(PARAMETER) and name not in trained:
            return f"{name} was trained there, and is not here"
    if engine.average.runs and not any(name.startswith(AVERAGE) for name in shapes):
        return "it keeps no average of the weights, which start_averaging asked for"
    there = {name.partition(".")[0] for name in [*saved["moments"], *saved["numbers"]] if not name.startswith(ERRORS)}
    states = optim.state_names(engine.optimizer_config)
    if there and there != states:
        wants = ", ".join(sorted(states)) or "nothing"
        return f"its optimizer kept {', '.join(sorted(there))}; {engine.optimizer_config.name} keeps {wants}"
    return None


def make_room(engine: Trained, saved: Mapping[str, Any]) -> None:
    """Give the optimizer exactly the states that the checkpoint has: a parameter without a gradient has none yet."""
    assert engine.optimizer is not None
    if isinstance(engine.optimizer, OffloadedOptimizer):
        engine.optimizer.restore_scalars(saved["moments"], saved["numbers"])
        return
    if saved["moments"] or saved["numbers"]:
        optim.make_states(engine.optimizer)
    kept = {name.partition(".")[2] for name in [*saved["moments"], *saved["numbers"]]}
    for name, parameter in engine.module.named_parameters():
        if name not in kept:
            engine.optimizer.state.pop(parameter, None)


def restore_scalars(engine: Trained, saved: Mapping[str, Any]) -> None:
    """Counters and numbers as they were; the tensors are there already."""
    assert engine.optimizer is not None
    engine.step_count = saved["step_count"]
    engine.scaler.restore(saved["scaler"])
    if isinstance(engine.optimizer, OffloadedOptimizer):
        engine.optimizer.write_to_module("parameter")
        return
    for name, tensor in optim.states(engine.module, engine.optimizer):
        if not tensor.ndim:
            tensor.fill_(saved["numbers"][name])


def is_buffer(name: str) -> bool:
    """Whether what `tensors` calls so is a buffer of the module."""
    return name.startswith(BUFFER)


def _told(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: telling_its_chunks(tensor) if in_chunks(tensor) else tensor for name, tensor in tensors.items()}
