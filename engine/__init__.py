"""A ZeRO engine for any `nn.Module`, on PyTorch's FSDP2, with a hybrid flip between training and generation.

Other rooms import only the names in `__all__`. Lower-case names without a call are namespaces: modules whose own
`__all__` lists what other rooms may use.

- `attention`: attention as the generator computes it, and how many positions a model has.
- `checkpoint`: sharded training state on disk.
- `deepspeed_json`: DeepSpeed configuration files.
- `distributed`: this process among the ranks, and the collectives.
- `kernels`: kernels with one name for all devices.
- `loading`: parameters read from safetensors folders, or drawn from a seed, into a sharded module.
- `memory`: bytes and seconds of a model under the engine, predicted from its shape.
- `oom`: a pass that ran out of memory, and the micro-batch size that fits.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine import checkpoint, kernels, loading, memory, oom
from engine import parallel as distributed
from engine.checkpoint import Checkpointer
from engine.config import EngineConfig, LossScale, OptimizerConfig
from engine.engine import Engine, LossFn, Update
from engine.generation import attention
from engine.generation.generator import Generation, Generator
from engine.generation.sampling import Sampling
from engine.parallel.dtensors import token_logprobs

if TYPE_CHECKING:
    from engine import deepspeed_json
    from engine.entry import initialize

__all__ = [
    "Checkpointer",
    "Engine",
    "EngineConfig",
    "Generation",
    "Generator",
    "LossFn",
    "LossScale",
    "OptimizerConfig",
    "Sampling",
    "Update",
    "attention",
    "checkpoint",
    "deepspeed_json",
    "distributed",
    "initialize",
    "kernels",
    "loading",
    "memory",
    "oom",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    """Import `initialize` and `deepspeed_json` at their first use: a stage of zerochat needs neither."""
    if name == "initialize":
        return import_module("engine.entry").initialize
    if name == "deepspeed_json":
        return import_module("engine.deepspeed_json")
    raise AttributeError(f"module engine has no attribute {name}")
