"""A ZeRO engine for any `nn.Module`, on PyTorch's FSDP2, with a hybrid flip between training and generation."""

from engine.checkpoint import Checkpointer
from engine.config import EngineConfig, OptimizerConfig
from engine.engine import Engine, Update
from engine.entry import initialize
from engine.parallel.head import token_logprobs
from engine.rollout.rollouts import Generation, Rollouts
from engine.rollout.sampling import Sampling

__all__ = [
    "Checkpointer",
    "Engine",
    "EngineConfig",
    "Generation",
    "OptimizerConfig",
    "Rollouts",
    "Sampling",
    "Update",
    "initialize",
    "token_logprobs",
]
