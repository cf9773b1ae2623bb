"""The configuration of an engine: frozen values that are validated when they are created.

The ZeRO stages are those of Rajbhandari et al., 2020, arXiv:1910.02054. Stage 0 replicates, stage 1 shards optimizer
states, stage 2 also gradients, stage 3 also parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

import torch

Precision = Literal["bf16", "fp16", "fp32"]
TORCH_DTYPE: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Compress = Literal["none", "gather8", "reduce8", "both"]
Schedule = Literal["constant", "linear", "cosine"]
Tier = Literal["none", "cpu", "nvme"]
SMALLEST_SUB_GROUP = 1024  # parameters, a page of fp32
MAX_INITIAL_POWER = 32  # the largest fp16 number is below 2**16


def check_choices(settings: Any) -> None:
    """Raise ValueError if a field of a dataclass whose type is a Literal has another value."""
    for each in fields(settings):
        choices, value = get_args(each.type), getattr(settings, each.name)
        if get_origin(each.type) is Literal and value not in choices:
            raise ValueError(f"{each.name} must be {', '.join(choices[:-1])} or {choices[-1]}, not {value}")


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling of fp16: start at 2**initial_power, halve on overflow, double after `window` good steps.

    An overflow costs one unit of `hysteresis`; the scale halves when none is left. `refill` restores the hysteresis
    after every good step. `static` is a constant scale instead.
    """

    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    refill: bool = False
    static: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.initial_power <= MAX_INITIAL_POWER:
            raise ValueError(f"initial_power must be from 0 to {MAX_INITIAL_POWER}, not {self.initial_power}")
        if self.window < 1 or self.hysteresis < 1:
            raise ValueError(f"window and hysteresis must be at least 1, not {self.window} and {self.hysteresis}")
        if self.minimum <= 0 or (self.static is not None and self.static <= 0):
            raise ValueError(f"a loss scale must be above 0, not {self.minimum if self.minimum <= 0 else self.static}")


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer, its learning rate by optimizer step, and the clipping before it.

    `name` is adamw (decoupled decay; Loshchilov & Hutter, 2019), adam, lion, onebitadam or a class of torch.optim, in
    upper or lower case. `betas` and `eps` belong to the first four; `options` are further arguments of the class.
    `decay="matrices"` applies weight decay to matrices only, not to biases and norms.

    `lr` is the peak rate. It is reached after `warmup_steps` linear steps and falls by `schedule` to
    `lr * final_lr_ratio` at `total_steps`. Without `total_steps` it stays constant. `max_grad_norm` is the global L2
    norm for clipping; 0 disables clipping.
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
        check_choices(self)
        if self.lr < 0:
            raise ValueError(f"lr must be at least 0, not {self.lr}")
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, not {self.total_steps}")
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm must be at least 0 (0 disables clipping), not {self.max_grad_norm}")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {self.betas}")


@dataclass(frozen=True)
class EngineConfig:
    """How a module is sharded over the ranks, and in which precision it computes.

    `offload_optimizer` puts fp32 masters and moments into host memory or files and runs the optimizer on the host, for
    the share `offload_ratio` of the parameters. `offload_parameters` puts the parameter shards there too; a unit comes
    to the device when it computes. Files are created in `nvme_path` (default: the temporary folder). One optimizer call
    steps `sub_group_size` parameters.

    `shard_ranks` consecutive ranks share one copy of the model (HSDP); None means all ranks. `gradient_accumulation` is
    the number of micro-batches per step for `backward` and `step`; `update` counts its own. Gradients are reduced in
    `reduce_dtype`. `compress` sends parameter gathers, gradient reductions, or both in 8 bits
    (engine/parallel/comm_hooks.py).

    `states` are fp32 masters and moments, or bf16 parameters and moments without masters
    (engine/optimizers/bf16_adamw.py).

    `tensor_parallel` consecutive ranks share each matrix and get the same data. `tensor_plan` says how ({pattern of
    module names: style}, engine/parallel/tensor.py); None uses the plan of the model's class.

    `pipeline_parallel` is the number of stages that share the blocks of a language model
    (engine/parallel/pipeline_parallel.py).

    `sequence_parallel` consecutive ranks share the tokens of a row (engine/parallel/sequence.py). ZeRO shards over
    these ranks too.
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
    sequence_parallel: int = 1

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage must be 0, 1, 2 or 3, not {self.zero_stage}")
        check_choices(self)
        counts = ("shard_ranks", "tensor_parallel", "pipeline_parallel", "sequence_parallel", "gradient_accumulation")
        for key in counts:
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")
        if not 0.0 <= self.offload_ratio <= 1.0:
            raise ValueError(f"offload_ratio must be between 0 and 1, not {self.offload_ratio}")
        if self.sub_group_size < SMALLEST_SUB_GROUP:
            raise ValueError(
                f"sub_group_size must be at least {SMALLEST_SUB_GROUP} parameters, not {self.sub_group_size}"
            )
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.compress != "none" and self.zero_stage == 0:
            raise ValueError(
                f"compress={self.compress} needs zero_stage=1, 2 or 3. With zero_stage=0, the optimizer onebitadam "
                "sends fewer bytes"
            )
        if self.offload_parameters == "nvme" and self.zero_stage != 3:
            raise ValueError(f"offload_parameters=nvme needs zero_stage=3, not {self.zero_stage}")
        if self.states == "bf16":
            self._require("states=bf16", dtype="bf16", offload_optimizer="none", tensor_parallel=1)
        if self.sequence_parallel > 1:
            key = f"sequence_parallel={self.sequence_parallel}"
            self._require(key, tensor_parallel=1, pipeline_parallel=1, compile_blocks=False)
        if self.pipeline_parallel > 1:
            key = f"pipeline_parallel={self.pipeline_parallel}"
            self._require(
                key,
                *(["zero_stage=0, 1 or 2"] if self.zero_stage == 3 else []),
                offload_optimizer="none",
                offload_parameters="none",
                compile_blocks=False,
                compress="none",
                states="fp32",
                tensor_parallel=1,
                gradient_accumulation=1,
            )

    def _require(self, key: str, *missing: str, **values: object) -> None:
        """Raise ValueError if something is `missing`, or if fields do not have the `values` that `key` needs."""
        wrong = [*missing, *(f"{name}={value}" for name, value in values.items() if getattr(self, name) != value)]
        if wrong:
            raise ValueError(f"{key} needs {', '.join(wrong)}")
