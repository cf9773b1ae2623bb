"""What a model needs, before it is there: DeepSpeed's estimates, and our own prediction by owner and phase."""

from engine.memory.shapes import Shape, shape_of
from engine.memory.stages import Demand, ppo_demand, reward_demand, sft_demand
from engine.memory.states import ModelStates, frozen_states, model_states
from engine.memory.workload import Workload

__all__ = [
    "Demand",
    "ModelStates",
    "Shape",
    "Workload",
    "frozen_states",
    "model_states",
    "ppo_demand",
    "reward_demand",
    "sft_demand",
    "shape_of",
]
