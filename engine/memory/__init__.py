"""Memory and speed of a model under the engine: predicted from its shape, and measured while it runs.

`measure_shape` counts a model on the meta device. `Workload` describes its layout and micro-batches; the functions of
`workload` predict bytes by owner. `measure_speed` and `CostModel` predict seconds. `MemoryTracker` measures bytes by
owner.
"""

from engine.memory.activations import activations
from engine.memory.model_shape import ModelShape, measure_shape
from engine.memory.speed import CostModel, Probe, measure_speed
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
