"""The state of an engine in a checkpoint: tensors by name, and counters in JSON."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine import optim
from engine.checkpoint.storage import LocalChunks, chunks_of
from engine.loading import persistent_buffers
from engine.offload import OffloadedOptimizer
from engine.optimizers.onebit_adam import ERRORS
from engine.parallel import dist

if TYPE_CHECKING:
    from engine.engine import Engine

PARAMETER, AVERAGE, BUFFER = "parameter.", "average.", "buffer."


def tensors(engine: "Engine") -> dict[str, LocalChunks]:
    """Return trained parameters, optimizer states, averages and buffers by name.

    A parameter with an fp32 master is represented by its master.
    """
    assert engine.optimizer is not None
    buffers = {f"{BUFFER}{name}": buffer for name, buffer in persistent_buffers(engine.module).items()}
    if isinstance(engine.optimizer, OffloadedOptimizer):
        states = engine.optimizer.states().items()
        offloaded = {name: LocalChunks(state.parameter, state.values) for name, state in states}
        return offloaded | {name: chunks_of(buffer) for name, buffer in buffers.items()}
    trained = {f"{PARAMETER}{n}": p.detach() for n, p in engine.module.named_parameters() if p.requires_grad}
    moments = {name: tensor for name, tensor in optim.states(engine.module, engine.optimizer) if tensor.ndim}
    averages = {f"{AVERAGE}{name}": mean for name, mean in engine.average.tensors.items()}
    return {name: chunks_of(tensor) for name, tensor in (trained | moments | averages | buffers).items()}


def tensors_to_load(engine: "Engine", saved: Mapping[str, Any]) -> dict[str, LocalChunks]:
    """Return the tensors to read from a checkpoint with these counters.

    The errors of 1-bit Adam belong to a number of ranks. At another number they start at zero again.
    """
    found = tensors(engine)
    missing = {name for name in found if name.startswith(ERRORS) and name not in saved["moments"]}
    for name in missing:
        found.pop(name).values.zero_()
    return found


def counters(engine: "Engine") -> dict[str, Any]:
    """Return the step count, the loss scale, and the optimizer's numbers, for JSON. Every rank calls."""
    assert engine.optimizer is not None
    if isinstance(engine.optimizer, OffloadedOptimizer):
        moments = [name for name, state in engine.optimizer.states().items() if state.is_moment]
        numbers = engine.optimizer.scalars()
    else:
        states = dict(optim.states(engine.module, engine.optimizer))
        moments = [name for name, tensor in states.items() if tensor.ndim]
        numbers = {name: tensor.item() for name, tensor in states.items() if not tensor.ndim}
    if dist.world().pipeline > 1:  # each rank of a pipeline has the states of its own blocks
        ranks = dist.gather_objects((moments, numbers))
        moments = list(dict.fromkeys(name for names, _ in ranks for name in names))
        numbers = {name: value for _, values in ranks for name, value in values.items()}
    return {
        "step_count": engine.step_count,
        "scaler": engine.scaler.state(),
        "moments": moments,
        "numbers": numbers,
    }


def difference(engine: "Engine", saved: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> str | None:
    """Return why a checkpoint with these counters and shapes does not fit this engine. None if it fits."""
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
            return f"{name} was trained there, and is not trained here"
    if engine.average.runs and not any(name.startswith(AVERAGE) for name in shapes):
        return "it has no average of the weights, but start_averaging was called here"
    there = {name.partition(".")[0] for name in [*saved["moments"], *saved["numbers"]] if not name.startswith(ERRORS)}
    states = optim.state_names(engine.optimizer_config)
    if there and there != states:
        here_states = ", ".join(sorted(states)) or "none"
        return (
            f"its optimizer has the states {', '.join(sorted(there))}; {engine.optimizer_config.name} has {here_states}"
        )
    return None


def allocate_states(engine: "Engine", saved: Mapping[str, Any]) -> None:
    """Give the optimizer exactly the states that the checkpoint has: a parameter without a gradient has none yet."""
    assert engine.optimizer is not None
    if isinstance(engine.optimizer, OffloadedOptimizer):
        engine.optimizer.restore_scalars(saved["moments"], saved["numbers"])
        return
    if saved["moments"] or saved["numbers"]:
        optim.make_states(engine.optimizer)
    stepped = {name.partition(".")[2] for name in [*saved["moments"], *saved["numbers"]]}
    for name, parameter in engine.module.named_parameters():
        if name not in stepped:
            engine.optimizer.state.pop(parameter, None)


def restore_counters(engine: "Engine", saved: Mapping[str, Any]) -> None:
    """Restore step count, loss scale and the optimizer's numbers, after the tensors were loaded."""
    assert engine.optimizer is not None
    engine.step_count = saved["step_count"]
    engine.scaler.restore(saved["scaler"])
    if isinstance(engine.optimizer, OffloadedOptimizer):
        engine.optimizer.write_to_module("parameter")
        return
    for name, tensor in optim.states(engine.module, engine.optimizer):
        if not tensor.ndim:
            tensor.fill_(saved["numbers"][name])
