"""Memory and speed of a model under the engine: predicted from its shape, and measured while it runs.

`measure_shape` counts a model on the meta device. `Workload` describes its layout and micro-batches; the functions of
`workload` predict bytes by owner. `measure_speed` and `CostModel` predict seconds. `MemoryTracker` measures bytes by
owner.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.memory.activations import activations
from engine.memory.model_shape import ModelShape, measure_shape
from engine.memory.states import ModelStates, Owners, frozen_states, model_states
from engine.memory.workload import (
    RETAINED,
    GenerationLoad,
    Workload,
    generation_bytes,
    pipeline_training_bytes,
    resting_bytes,
    scoring_bytes,
    scoring_states,
    trained_states,
    training_bytes,
)

if TYPE_CHECKING:
    from engine.memory.speed import CostModel, Probe, measure_speed

__all__ = [
    "RETAINED",
    "CostModel",
    "GenerationLoad",
    "ModelShape",
    "ModelStates",
    "Owners",
    "Probe",
    "Workload",
    "activations",
    "frozen_states",
    "generation_bytes",
    "measure_shape",
    "measure_speed",
    "model_states",
    "pipeline_training_bytes",
    "resting_bytes",
    "scoring_bytes",
    "scoring_states",
    "trained_states",
    "training_bytes",
]


def __getattr__(name: str) -> Any:
    """Import the prediction of seconds at its first use: only the choice of a setting needs it."""
    if name in ("CostModel", "Probe", "measure_speed"):
        return getattr(import_module("engine.memory.speed"), name)
    raise AttributeError(f"module engine.memory has no attribute {name}")
