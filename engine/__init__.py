"""A ZeRO engine for any `nn.Module`, on PyTorch's FSDP2, with a hybrid flip between training and generation.

Other rooms import only the names in `__all__`. Lower-case names without a call are namespaces: modules whose own
`__all__` lists what other rooms may use.

- `deepspeed_json`: DeepSpeed configuration files.
- `distributed`: this process among the ranks, and the collectives.
- `loading`: parameters read from safetensors folders, or drawn from a seed, into a sharded module.
- `oom`: a pass that ran out of memory, and the micro-batch size that fits.
"""

from engine import deepspeed_json, loading, oom
from engine.checkpoint import Checkpointer
from engine.config import EngineConfig, OptimizerConfig
from engine.engine import Engine, LossFn, Update
from engine.entry import initialize
from engine.generation.generator import Generation, Generator
from engine.generation.sampling import Sampling
from engine.parallel import dist as distributed
from engine.parallel.head import token_logprobs

__all__ = [
    "Checkpointer",
    "Engine",
    "EngineConfig",
    "Generation",
    "Generator",
    "LossFn",
    "OptimizerConfig",
    "Sampling",
    "Update",
    "deepspeed_json",
    "distributed",
    "initialize",
    "loading",
    "oom",
    "token_logprobs",
]
