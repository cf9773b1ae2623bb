"""The table of all keys and optimizers of a DeepSpeed configuration; `make docs` writes docs/reference/deepspeed.md.

Defaults are those of DeepSpeed's code (deepspeed/runtime/zero/config.py, offload_config.py, precision_config.py,
constants.py). They differ from its manual in places.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine import optim
from engine.schedules import SCHEDULES, parameters

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "deepspeed.md"
MARKER = "<!-- `make docs` writes everything below this line -->\n"


@dataclass(frozen=True)
class Key:
    """A key: its JSON type, or "ignored" (no effect), or "unsupported" (only a value that switches it off is accepted).

    `note` is the meaning, the reason, or what to write instead. `field` is the field of `EngineConfig`, in the section
    `fp16` of `LossScale`. A key without a field sets several fields, or one field with other keys.
    """

    kind: Literal["bool", "int", "number", "text", "ignored", "unsupported"]
    note: str
    field: str | None = None
    choices: tuple[str | int, ...] = ()
    minimum: float | None = None


DEVICES = ("none", "cpu", "nvme")
NVME_PATH = "folder for the files of the run; default: the temporary folder"

SUPPORTED: dict[str, Key] = {
    "train_batch_size": Key("int", "checked: micro-batch size x accumulation steps x ranks", minimum=1),
    "train_micro_batch_size_per_gpu": Key("int", "batch size of the returned data loader", minimum=1),
    "gradient_accumulation_steps": Key("int", "`step()` updates at every n-th call", minimum=1),
    "gradient_clipping": Key("number", "global L2 norm, default 1; 0 turns clipping off", minimum=0),
    "communication_data_type": Key(
        "text", "type of gradient reductions, default fp32", "reduce_dtype", ("fp32", "bf16", "fp16", "bfp16")
    ),
    "dataloader_drop_last": Key("bool", "the returned data loader drops an incomplete last batch"),
    "fp16.enabled": Key("bool", "compute in fp16 with fp32 master weights and loss scaling"),
    "fp16.loss_scale": Key("number", "a constant scale; 0 (default) adapts the scale", "static"),
    "fp16.initial_scale_power": Key("int", "the first scale is 2**n, default 16", "initial_power"),
    "fp16.loss_scale_window": Key("int", "steps without overflow before the scale doubles, default 1000", "window"),
    "fp16.hysteresis": Key(
        "int", "overflows before the scale halves, default 2; no effect at stage 0, as in DeepSpeed", "hysteresis"
    ),
    "fp16.consecutive_hysteresis": Key("bool", "a step without overflow resets the count of overflows", "refill"),
    "fp16.min_loss_scale": Key("number", "lowest scale, default 1; an overflow at this scale stops the run", "minimum"),
    "bf16.enabled": Key("bool", "compute in bf16 with fp32 master weights"),
    "zero_optimization.stage": Key(
        "int", "0 replicates, 1 shards optimizer states, 2 gradients, 3 parameters", "zero_stage", (0, 1, 2, 3)
    ),
    "zero_optimization.zero_quantized_weights": Key("bool", "gather parameters in blockwise int8 (stages 1 to 3)"),
    "zero_optimization.zero_quantized_gradients": Key("bool", "send gradients in blockwise int8 (stages 1 to 3)"),
    "zero_optimization.mics_shard_size": Key(
        "int", "number of ranks that share one copy of the model; -1 (default): all", "shard_ranks"
    ),
    "zero_optimization.offload_param.device": Key(
        "text", "device of parameter shards between uses", "offload_parameters", DEVICES
    ),
    "zero_optimization.offload_param.nvme_path": Key("text", NVME_PATH, "nvme_path"),
    "zero_optimization.offload_optimizer.device": Key(
        "text", "device of optimizer states", "offload_optimizer", DEVICES
    ),
    "zero_optimization.offload_optimizer.nvme_path": Key("text", NVME_PATH, "nvme_path"),
    "zero_optimization.offload_optimizer.ratio": Key(
        "number", "share of the parameters whose optimizer states are offloaded, default 1", "offload_ratio"
    ),
    "zero_optimization.sub_group_size": Key(
        "int", "parameters per offloaded update; default here: 8388608", "sub_group_size"
    ),
    "activation_checkpointing.partition_activations": Key("bool", "true recomputes every block in backward"),
    "activation_checkpointing.number_checkpoints": Key("int", "any number recomputes every block in backward"),
}

ALWAYS = "always on"
ENGINE = "the engine or the model decides"
FSDP2 = "FSDP2 gathers and reduces one block at a time, and gathers the next block during computation"
FP32 = "gradients are reduced and accumulated in fp32"
SAVED = "checkpoints are sharded, written in the background, and load at any number of ranks; an export is not sharded"
IGNORED: dict[str, dict[str, str]] = {
    "": {
        FP32: "prescale_gradients gradient_predivide_factor fp32_allreduce gradient_accumulation_dtype data_types",
        "the training loop logs metrics, and torch.profiler records operations": "steps_per_print wall_clock_breakdown "
        "timers tensorboard wandb csv_monitor comet flops_profiler memory_breakdown comms_logger dump_state",
        SAVED: "use_node_local_storage checkpoint nebula",
        ENGINE: "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather graph_harvesting aio "
        "seq_parallel_communication_data_type use_data_before_expert_parallelism vocabulary_size",
    },
    "fp16": {ALWAYS: "auto_cast"},
    "bf16": {ALWAYS: "immediate_grad_update check_grad_overflow"},
    "zero_optimization": {
        FSDP2: "reduce_bucket_size allgather_bucket_size use_multi_rank_bucket_allreduce contiguous_gradients "
        "round_robin_gradients stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_module_granularity_threshold leaf_module stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential memory_efficient_linear enable_sanity_checks log_trace_cache_warnings "
        "legacy_stage1 override_module_apply mics_hierarchical_params_gather",
        ALWAYS: "overlap_comm reduce_scatter allgather_partitions ignore_unused_parameters cpu_offload_use_pin_memory",
        SAVED: "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
    },
    "zero_optimization.offload_param": {
        ALWAYS: "pin_memory",
        "the page cache buffers shards on NVMe": "buffer_count buffer_size max_in_cpu",
    },
    "zero_optimization.offload_optimizer": {
        ALWAYS: "pin_memory pipeline_read pipeline_write",
        "sub_group_size sets the size of the buffers": "buffer_count",
        "the first step creates the optimizer states": "fast_init",
        "OMP_NUM_THREADS sets the number of cores": "cpuadam_cores_perc",
    },
    "activation_checkpointing": {
        ENGINE: "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
    },
    "hybrid_engine": {
        "`engine.generating()` is always available": "enabled",
        "`engine.generating(keep=False)` frees the buffers": "release_inference_cache",
        "the generator decides": "max_out_tokens pin_parameters tp_gather_partition_size enable_cuda_graph",
    },
}
"""Reason and names of keys without effect, by section."""

MASTERS = "master weights, gradients and optimizer states are fp32; write false"
UNSUPPORTED: dict[str, str] = {
    "fp16.fp16_master_weights_and_grads": MASTERS,
    "bf16.bf16_master_weights_and_grads": MASTERS,
    "bf16.bf16_optimizer_states": MASTERS,
    "torch_autocast": "modules are cast as a whole; write bf16.enabled=true",
    "amp": "NVIDIA apex is not used; write bf16.enabled or fp16.enabled",
    "zero_optimization.zero_hpz_partition_size": "no secondary partition; write mics_shard_size=GPUS_PER_MACHINE",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights are stored in 16 bits; write "
    "zero_quantized_weights=true to send them in 8 bits",
    "zero_optimization.zeropp_loco_param": "reductions have no error feedback; remove this key",
    "zero_optimization.offload_optimizer.super_offload": "write offload_optimizer.device=cpu",
    "zero_optimization.cpu_offload": "DeepSpeed removed this key; write offload_optimizer.device=cpu",
    "zero_optimization.cpu_offload_params": "DeepSpeed removed this key; write offload_param.device=cpu",
    "activation_checkpointing.cpu_checkpointing": "inputs of blocks stay on the device; write "
    "partition_activations=true",
    "hybrid_engine.inference_tp_size": "the caller of the generator splits it over ranks; write 1",
    "sparse_gradients": "gradients are dense; write false",
    "sparse_attention": "the model defines its attention; remove this section",
    "autotuning": "`engine=auto` chooses the setting; remove this section",
    "elasticity": "a run resumes at any number of ranks; remove this section",
    "curriculum_learning": "sort the data before training; remove this section",
    "data_efficiency": "sample the data before training; remove this section",
    "progressive_layer_drop": "all layers are trained; remove this section",
    "compression_training": "full models and LoRA adapters are trained; remove this section",
    "quantize_training": "training is in bf16, fp16 or fp32; remove this section",
    "eigenvalue": "part of quantize_training; remove this section",
    "compile": "write EngineConfig(compile_blocks=True)",
    "zenflow": "every gradient is applied in its own step; remove this section",
    "weight_quantization_config": "frozen weights stay in 16 bits; remove this section",
    "pipeline": "write EngineConfig(pipeline_parallel=N), or zero_optimization.stage=3",
    "tensor_parallel": "write EngineConfig(tensor_parallel=N)",
    "sequence_parallel_size": "write EngineConfig(sequence_parallel=N)",
}

KEYS: dict[str, Key] = {
    **SUPPORTED,
    **{
        f"{section}.{name}".lstrip("."): Key("ignored", reason)
        for section, rows in IGNORED.items()
        for reason, names in rows.items()
        for name in names.split()
    },
    **{name: Key("unsupported", remedy) for name, remedy in UNSUPPORTED.items()},
}

ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
TORCH_ADAM = ADAM | {
    "bias_correction": True, "adam_w_mode": True, "torch_adam": False, "fused": True, "amsgrad": False,
    "set_grad_none": True, "fp32_optimizer_states": True,
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": TORCH_ADAM,
    "AdamW": TORCH_ADAM,
    "Lion": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
    "Adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "OneBitAdam": ADAM | {
        "freeze_step": 100_000, "bias_correction": True, "eps_inside_sqrt": False, "amsgrad": False,
        "cuda_aware": False, "comm_backend_name": "nccl",
    },
    "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}  # fmt: skip
"""The parameters of the optimizers that DeepSpeed names, with their defaults."""
TRUST_RATIO = "its trust ratio needs full parameters, and a rank has shards; write AdamW"
MUP = "widths are not scaled (package mup); write"
UNSUPPORTED_OPTIMIZERS = {
    "ZeroOneAdam": "the only compressed optimizer is OneBitAdam; write OneBitAdam",
    "OneBitLamb": "the only compressed optimizer is OneBitAdam; write OneBitAdam",
    "Lamb": TRUST_RATIO,
    "FusedLamb": TRUST_RATIO,
    "MuAdam": f"{MUP} AdamW with the learning rate for this width",
    "MuAdamW": f"{MUP} AdamW with the learning rate for this width",
    "MuSGD": f"{MUP} SGD with the learning rate for this width",
    **{
        name: f"{optim.UNSUPPORTED[name.lower()]}; write AdamW or Lion"
        for name in ("Muon", "LBFGS", "Adafactor", "SparseAdam", "Rprop")
    },
}
CYCLES = "write WarmupCosineLR, or pass lr_scheduler=torch.optim.lr_scheduler"
UNSUPPORTED_SCHEDULERS = {
    "OneCycle": f"{CYCLES}.OneCycleLR(...) to `initialize`",
    "LRRangeTest": f"{CYCLES}.LambdaLR(...) to `initialize`",
}


def page() -> str:
    """Return docs/reference/deepspeed.md with current tables. The text above the marker is written by hand."""
    ignored = [
        (", ".join(f"`{section}.{name}`".replace("`.", "`") for name in names.split()), reason)
        for section, rows in IGNORED.items()
        for reason, names in rows.items()
    ]
    any_class = ("any other class of torch.optim", "the arguments of the class")
    optimizers = [*((name, _parameters(known)) for name, known in OPTIMIZERS.items()), any_class]
    schedulers = [(name, _parameters(parameters(known))) for name, known in SCHEDULES.items()]
    lines = [
        *_table("Supported keys", "key | type | meaning", ((f"`{n}`", k.kind, _note(k)) for n, k in SUPPORTED.items())),
        *_table("Ignored keys", "keys | reason", ignored),
        *_table("Unsupported keys", "key | write instead", ((f"`{n}`", remedy) for n, remedy in UNSUPPORTED.items())),
        *_table("Optimizers (`optimizer.type`, upper or lower case)", "type | parameters", optimizers),
        *("Unsupported:", "", *(f"- {name}: {reason}" for name, reason in UNSUPPORTED_OPTIMIZERS.items()), ""),
        *_table("Schedulers (`scheduler.type`)", "type | parameters", schedulers),
        *("Unsupported:", "", *(f"- {name}: {remedy}" for name, remedy in UNSUPPORTED_SCHEDULERS.items())),
    ]
    return PAGE.read_text(encoding="utf-8").partition(MARKER)[0] + MARKER + "\n" + "\n".join(lines) + "\n"


def _table(title: str, header: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a section with a table."""
    rule = " | ".join("---" for _ in header.split(" | "))
    return [f"## {title}", "", f"| {header} |", f"| {rule} |", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _note(key: Key) -> str:
    return f"{key.note}; one of {', '.join(map(str, key.choices))}" if key.choices else key.note


def _parameters(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" + ("" if v is None else f" {_shown(v)}") for name, v in parameters.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
