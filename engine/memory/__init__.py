"""Memory and speed of a model under the engine: predicted from its shape, and measured while it runs.

`measure_shape` counts a model on the meta device. `Workload` describes its layout and micro-batches; `trained_states`
and `training_bytes` predict bytes by owner. `CostModel` predicts seconds from the rates of a machine, which
`measure_rates` measures and `tabulated_rates` reads from a table. `MemoryTracker` measures bytes by owner.
`host_memory` returns the host memory that this process may use.
"""

from engine.generation.kv_cache import VLLM_SEQUENCES
from engine.host_memory import host_memory
from engine.memory.cost_model import CostModel
from engine.memory.model_shape import ModelShape, largest_pipeline_stage, measure_shape
from engine.memory.phases import (
    RETAINED,
    GenerationLoad,
    generation_bytes,
    resting_bytes,
    scoring_bytes,
    training_bytes,
)
from engine.memory.rates import GPUS, Rates, measure_rates, tabulated_rates
from engine.memory.states import (
    ModelStates,
    Owners,
    Workload,
    bytes_per_trained_parameter,
    checkpoint_bytes,
    frozen_states,
    model_bytes,
    trained_states,
)

__all__ = [
    "GPUS",
    "RETAINED",
    "VLLM_SEQUENCES",
    "CostModel",
    "GenerationLoad",
    "ModelShape",
    "ModelStates",
    "Owners",
    "Rates",
    "Workload",
    "bytes_per_trained_parameter",
    "checkpoint_bytes",
    "frozen_states",
    "generation_bytes",
    "host_memory",
    "largest_pipeline_stage",
    "measure_rates",
    "measure_shape",
    "model_bytes",
    "resting_bytes",
    "scoring_bytes",
    "tabulated_rates",
    "trained_states",
    "training_bytes",
]
