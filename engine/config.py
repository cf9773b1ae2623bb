"""What the engine is told: plain frozen values, checked where they are made.

The vocabulary is ZeRO's (Rajbhandari et al., 2020, arXiv:1910.02054): stage 0 replicates, 1 shards
optimizer states, 2 gradients as well, 3 parameters as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["bf16", "fp16", "fp32"]
Compress = Literal["none", "gather8", "reduce8", "both"]
Schedule = Literal["constant", "linear", "cosine"]
PipelineSchedule = Literal["1f1b", "gpipe"]
Tier = Literal["none", "cpu", "nvme"]
LARGEST_POWER = 32  # of two, that a loss scale begins at: fp16's largest number is below 2**16


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling of fp16: start at 2**initial_power, halve on overflow, double after `window` good steps.

    `refill` fills the hysteresis after every good step. `static` is a scale that never changes instead.
    """

    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    refill: bool = False
    static: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.initial_power <= LARGEST_POWER:
            raise ValueError(f"the first loss scale is 2**n with n from 0 to {LARGEST_POWER}, not {self.initial_power}")
        if self.window < 1 or self.hysteresis < 1:
            raise ValueError(f"window and hysteresis must be at least 1, not {self.window} and {self.hysteresis}")
        if self.minimum <= 0 or (self.static is not None and self.static <= 0):
            raise ValueError(f"a loss scale must be above 0, not {self.minimum if self.minimum <= 0 else self.static}")


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer, its learning rate over optimizer steps, and the clipping before it.

    `name` is adamw (decoupled decay; Loshchilov & Hutter, 2019), adam, lion, onebitadam or any class of torch.optim, in
    any case of letters; `betas` and `eps` are those of the first four, `options` further arguments of the class.
    `decay` says who decays: `matrices` leaves biases and norms alone.

    `lr` is the peak rate; `warmup_steps` rise linearly to it, then `schedule` falls to `lr * final_lr_ratio` at
    `total_steps`. Without `total_steps` the rate stays. `max_grad_norm` is the global L2 norm; 0 turns clipping off.
    """

    lr: float
    total_steps: int | None = None
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    final_lr_ratio: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    name: str = "adamw"
    decay: Literal["matrices", "all"] = "matrices"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError(f"lr must be at least 0, not {self.lr}")
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, not {self.total_steps}")
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm must be at least 0, which does not clip, not {self.max_grad_norm}")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {self.betas}")


@dataclass(frozen=True)
class EngineConfig:
    """How a module is laid out over the ranks, and in which precision it computes.

    `offload_optimizer` keeps fp32 masters and moments in host memory or in files and steps there; the share
    `offload_ratio` of the parameters does, the rest steps on the device. `offload_parameters` keeps the shards there,
    and brings a unit to the device when it is needed. Files are made under `nvme_path` (the temporary folder by
    default); `sub_group_size` parameters are stepped together. `shard_ranks` are the neighbouring ranks that share one
    copy of the model (HSDP); None is all of them. `gradient_accumulation` is the
    micro-batches of one step in a loop that calls `backward` and `step`; `update` counts its own. Gradients are reduced
    in `reduce_dtype`.

    `compress` sends 8 bits a number: in gathers of parameters, reductions of gradients, or both (parallel/wire.py).

    `states` are fp32 masters and moments, or bf16 parameters and moments without masters
    (engine/optimizers/bf16_adamw.py).

    `tensor_parallel` neighbouring ranks hold each matrix between them and see the same data; `tensor_plan` says which
    and how ({pattern of module names: style}, engine/parallel/tensor.py), None takes what came with the model.

    `pipeline_parallel` ranks hold the blocks of a language model one after another (parallel/pipeline_parallel.py), and
    pass micro-batches on by `pipeline_schedule`: one forward, one backward in turn, or all forwards first.

    `sequence_parallel` neighbouring ranks see the same rows and hold their tokens between them, where the module shares
    them out (engine/parallel/sequence.py); ZeRO lays it out over these ranks as over all others.
    """

    zero_stage: int = 0
    dtype: Precision = "bf16"
    offload_optimizer: Tier = "none"
    offload_parameters: Tier = "none"
    offload_ratio: float = 1.0
    nvme_path: str | None = None
    sub_group_size: int = 2**23
    activation_checkpointing: bool = False
    compile_blocks: bool = False
    loss_scale: LossScale = field(default_factory=LossScale)
    gradient_accumulation: int = 1
    reduce_dtype: Precision = "fp32"
    shard_ranks: int | None = None
    compress: Compress = "none"
    states: Literal["fp32", "bf16"] = "fp32"
    tensor_parallel: int = 1
    tensor_plan: Mapping[str, str] | None = None
    pipeline_parallel: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    sequence_parallel: int = 1

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage must be 0, 1, 2 or 3, not {self.zero_stage}")
        if self.compress not in ("none", "gather8", "reduce8", "both"):
            raise ValueError(f"compress must be none, gather8, reduce8 or both, not {self.compress}")
        if self.compress != "none" and self.zero_stage == 0:
            raise ValueError(
                f"compress={self.compress} needs zero_stage=1, 2 or 3; at stage 0 the optimizer onebitadam sends less"
            )
        elsewhere = self.offload_optimizer != "none" or self.tensor_parallel > 1
        if self.states == "bf16" and (self.dtype != "bf16" or elsewhere):
            raise ValueError("states=bf16 needs dtype=bf16, offload_optimizer=none and tensor_parallel=1")
        if self.shard_ranks is not None and self.shard_ranks < 1:
            raise ValueError(f"shard_ranks must be at least 1, not {self.shard_ranks}")
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be at least 1, not {self.tensor_parallel}")
        if self.gradient_accumulation < 1:
            raise ValueError(f"gradient_accumulation must be at least 1, not {self.gradient_accumulation}")
        if self.offload_parameters == "nvme" and self.zero_stage != 3:
            raise ValueError(f"offload_parameters=nvme needs zero_stage=3, not {self.zero_stage}")
        if not 0.0 <= self.offload_ratio <= 1.0:
            raise ValueError(f"offload_ratio must be between 0 and 1, not {self.offload_ratio}")
        if self.sub_group_size < 1024:
            raise ValueError(f"sub_group_size must be at least 1024 parameters, not {self.sub_group_size}")
        if self.pipeline_parallel < 1:
            raise ValueError(f"pipeline_parallel must be at least 1, not {self.pipeline_parallel}")
        if self.pipeline_schedule not in ("1f1b", "gpipe"):
            raise ValueError(f"pipeline_schedule must be 1f1b or gpipe, not {self.pipeline_schedule}")
        if self.pipeline_parallel > 1 and (other := self._beside_pipeline()):
            raise ValueError(f"pipeline_parallel={self.pipeline_parallel} needs {', '.join(other)}")
        if self.sequence_parallel < 1:
            raise ValueError(f"sequence_parallel must be at least 1, not {self.sequence_parallel}")
        beside = ("tensor_parallel", 1), ("pipeline_parallel", 1), ("compile_blocks", False)
        if self.sequence_parallel > 1 and (wanted := [f"{k}={v}" for k, v in beside if getattr(self, k) != v]):
            raise ValueError(f"sequence_parallel={self.sequence_parallel} needs {', '.join(wanted)}")

    def _beside_pipeline(self) -> list[str]:
        """What has to be set to which value for the pieces of a pipeline."""
        wanted: dict[str, object] = {
            "offload_optimizer": "none",
            "offload_parameters": "none",
            "compile_blocks": False,
            "compress": "none",
            "states": "fp32",
            "tensor_parallel": 1,
            "gradient_accumulation": 1,
        }
        changed = [f"{key}={value}" for key, value in wanted.items() if getattr(self, key) != value]
        return (["zero_stage=0, 1 or 2"] if self.zero_stage == 3 else []) + changed
