"""A ZeRO engine for any `nn.Module`, on PyTorch's FSDP2, with a hybrid flip between training and generation."""

from engine.checkpoint import Checkpointer
from engine.config import EngineConfig, OptimizerConfig
from engine.engine import Engine, Update
from engine.entry import initialize
from engine.generation.rollouts import Generation, Rollouts
from engine.generation.sampling import Sampling
from engine.parallel.head import token_logprobs

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
