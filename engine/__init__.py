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

from engine import checkpoint, deepspeed_json, kernels, loading, memory, oom
from engine import parallel as distributed
from engine.checkpoint import Checkpointer
from engine.config import EngineConfig, LossScale, OptimizerConfig
from engine.engine import Engine, LossFn, Update
from engine.entry import initialize
from engine.generation import attention
from engine.generation.generator import Generation, Generator
from engine.generation.sampling import Sampling
from engine.parallel.dtensors import token_logprobs

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
