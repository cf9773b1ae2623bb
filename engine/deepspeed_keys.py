"""The table of all keys and optimizers of a DeepSpeed configuration; `make docs` writes docs/reference/deepspeed.md.

Defaults are those of DeepSpeed's code (deepspeed/runtime/zero/config.py, offload_config.py, precision_config.py,
constants.py). They differ from its manual in places.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine import optim
from engine.schedules import SCHEDULERS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "deepspeed.md"
MARKER = "<!-- `make docs` writes everything below this line -->\n"

Status = Literal["supported", "ignored", "unsupported"]
Type = Literal["bool", "int", "number", "text", "list", "section", "any"]


@dataclass(frozen=True)
class Key:
    """A dotted key with its type and DeepSpeed's default.

    supported: the key has an effect; `choices` are the values that it may have. ignored: every value is accepted and
    has no effect, for the reason in `note`. unsupported: only values that switch the feature off are accepted, and
    `note` says what to write instead.
    """

    name: str
    type: Type
    default: Any
    status: Status
    note: str
    choices: tuple[Any, ...] = ()


def _keys(section: str, status: Status, *rows: tuple[Any, ...]) -> list[Key]:
    """The keys of a section from rows (name, type, default, note[, choices])."""
    prefix = f"{section}." if section else ""
    return [Key(f"{prefix}{name}", kind, default, status, note, *rest) for name, kind, default, note, *rest in rows]


BUCKETS = "FSDP2 gathers and reduces one block of layers at a time"
AUTOMATIC = "FSDP2 decides"
FP32 = "gradients are reduced in fp32 and cannot overflow"
ACCUMULATED = "gradients accumulate in fp32"
MASTERS = "master weights, gradients and optimizer states are fp32; write false"
AUTOCAST = "modules are cast as a whole; write bf16.enabled=true"
PERSISTENT = "small parameters are gathered with their block"
EXPORT = "an export always writes full weights"
PAGE_CACHE = "shards on NVMe are memory-mapped files; the page cache buffers them"
BLOCKS = "the elements of nn.ModuleList are the units"
PINNED = "buffers for copies between host and GPU are always pinned"
NVME_PATH = "folder for the files of the run; default: the temporary folder"
AIO = "files are accessed with direct I/O in requests of a few MiB from a few threads"
METRICS = "the training loop logs metrics"
DEVICES = (None, "none", "cpu", "nvme")
REDUCTIONS = (None, "fp32", "bf16", "fp16", "bfp16")

SECTIONS: dict[str, list[Key]] = {
    "Batch and gradients": [
        *_keys(
            "", "supported",
            ("train_batch_size", "int", None, "checked: micro-batch size x accumulation steps x ranks"),
            ("train_micro_batch_size_per_gpu", "int", None, "batch size of the returned data loader"),
            ("gradient_accumulation_steps", "int", None, "`step()` updates at every n-th call"),
            ("gradient_clipping", "number", 1.0, "global L2 norm; 0 turns clipping off"),
            ("communication_data_type", "text", None, "type of gradient reductions; default: fp32", REDUCTIONS),
            ("dataloader_drop_last", "bool", False, "the returned data loader drops an incomplete last batch"),
        ),
        *_keys(
            "", "ignored",
            ("prescale_gradients", "bool", False, FP32),
            ("gradient_predivide_factor", "number", 1.0, FP32),
            ("fp32_allreduce", "bool", False, FP32),
            ("gradient_accumulation_dtype", "text", None, ACCUMULATED),
            ("data_types.grad_accum_dtype", "text", None, ACCUMULATED),
        ),
    ],
    "Precision": [
        *_keys(
            "fp16", "supported",
            ("enabled", "bool", False, "compute in fp16 with fp32 master weights and loss scaling"),
            ("loss_scale", "number", 0, "a constant scale; 0 adapts the scale"),
            ("initial_scale_power", "int", 16, "the first scale is 2 to this power"),
            ("loss_scale_window", "int", 1000, "steps without overflow before the scale doubles"),
            ("hysteresis", "int", 2, "overflows before the scale halves; no effect at stage 0, as in DeepSpeed"),
            ("consecutive_hysteresis", "bool", False, "a step without overflow resets the count of overflows"),
            ("min_loss_scale", "number", 1, "lowest scale; an overflow at this scale stops the run"),
        ),
        *_keys("fp16", "ignored", ("auto_cast", "bool", False, "floating-point inputs are always cast")),
        *_keys("fp16", "unsupported", ("fp16_master_weights_and_grads", "bool", False, MASTERS)),
        *_keys("bf16", "supported", ("enabled", "bool", False, "compute in bf16 with fp32 master weights")),
        *_keys(
            "bf16", "ignored",
            ("immediate_grad_update", "bool", False, "gradients are reduced in fp32 as soon as they are computed"),
            ("check_grad_overflow", "bool", True, "a step with a non-finite gradient is always skipped and counted"),
        ),
        *_keys(
            "bf16", "unsupported",
            ("bf16_master_weights_and_grads", "bool", False, MASTERS),
            ("bf16_optimizer_states", "bool", False, MASTERS),
        ),
        *_keys(
            "torch_autocast", "unsupported",
            ("enabled", "bool", False, AUTOCAST),
            ("dtype", "text", None, AUTOCAST),
            ("lower_precision_safe_modules", "list", None, AUTOCAST),
        ),
    ],
    "ZeRO and offload": [
        *_keys(
            "zero_optimization", "supported",
            ("stage", "int", 0, "0 replicates, 1 shards optimizer states, 2 gradients, 3 parameters", (0, 1, 2, 3)),
            ("zero_quantized_weights", "bool", False, "gather parameters in blockwise int8 (stages 1 to 3)"),
            ("zero_quantized_gradients", "bool", False, "send gradients in blockwise int8 (stages 1 to 3)"),
            ("mics_shard_size", "int", -1, "number of ranks that share one copy of the model; -1: all"),
            ("offload_param.device", "text", "none", "where parameter shards are kept (stage 3)", DEVICES),
            ("offload_param.nvme_path", "text", None, NVME_PATH),
            ("offload_optimizer.device", "text", "none", "where optimizer states are kept (stages 1 to 3)", DEVICES),
            ("offload_optimizer.nvme_path", "text", None, NVME_PATH),
            ("offload_optimizer.ratio", "number", 1.0, "share of the parameters whose optimizer states are offloaded"),
            ("sub_group_size", "number", 1e9, "parameters per offloaded update; default here: 8388608"),
        ),
        *_keys(
            "zero_optimization", "ignored",
            ("contiguous_gradients", "bool", True, "FSDP2 always reduces the gradients of a block from one buffer"),
            ("reduce_scatter", "bool", True, "always on from stage 1"),
            ("allgather_partitions", "bool", True, "always on from stage 1"),
            ("use_multi_rank_bucket_allreduce", "bool", True, BUCKETS),
            ("reduce_bucket_size", "number", 5e8, BUCKETS),
            ("allgather_bucket_size", "number", 5e8, BUCKETS),
            ("overlap_comm", "bool", None, "always on"),
            ("load_from_fp32_weights", "bool", True, "master weights are always loaded in the precision of the file"),
            ("stage3_prefetch_bucket_size", "number", 5e7, "FSDP2 gathers the next block during computation"),
            ("stage3_param_persistence_threshold", "number", 1e5, PERSISTENT),
            ("stage3_model_persistence_threshold", "number", None, PERSISTENT),
            ("stage3_max_live_parameters", "number", 1e9, "at most two blocks are gathered at the same time"),
            ("stage3_max_reuse_distance", "number", 1e9, "a block is released after use and gathered again"),
            ("stage3_gather_16bit_weights_on_model_save", "bool", False, EXPORT),
            ("stage3_gather_fp16_weights_on_model_save", "bool", False, EXPORT),
            ("stage3_module_granularity_threshold", "int", 0, BLOCKS),
            ("stage3_use_all_reduce_for_fetch_params", "bool", False, AUTOMATIC),
            ("stage3_allgather_sequential", "bool", False, AUTOMATIC),
            ("ignore_unused_parameters", "bool", True, "parameters without a gradient are not updated"),
            ("round_robin_gradients", "bool", False, BUCKETS),
            ("legacy_stage1", "bool", False, "there is one implementation of stage 1"),
            ("elastic_checkpoint", "bool", False, "checkpoints load at any number of ranks"),
            ("memory_efficient_linear", "bool", True, AUTOMATIC),
            ("override_module_apply", "bool", True, "modules are built on the meta device"),
            ("pipeline_loading_checkpoint", "bool", False, "each rank reads its own slices"),
            ("mics_hierarchical_params_gather", "bool", False, "NCCL chooses the algorithm"),
            ("enable_sanity_checks", "bool", False, AUTOMATIC),
            ("log_trace_cache_warnings", "bool", False, AUTOMATIC),
            ("leaf_module", "section", None, BLOCKS),
            ("cpu_offload_use_pin_memory", "bool", None, PINNED),
            ("offload_param.buffer_count", "int", 5, PAGE_CACHE),
            ("offload_param.buffer_size", "number", 1e8, PAGE_CACHE),
            ("offload_param.max_in_cpu", "number", 1e9, PAGE_CACHE),
            ("offload_param.pin_memory", "bool", True, PINNED),
            ("offload_optimizer.buffer_count", "int", 4, "sub_group_size sets the size of the buffers"),
            ("offload_optimizer.pin_memory", "bool", True, PINNED),
            ("offload_optimizer.pipeline_read", "bool", False, "always on"),
            ("offload_optimizer.pipeline_write", "bool", False, "always on"),
            ("offload_optimizer.fast_init", "bool", False, "the first step creates the optimizer states"),
            ("offload_optimizer.cpuadam_cores_perc", "number", 0.8, "OMP_NUM_THREADS sets the number of cores"),
        ),
        *_keys(
            "zero_optimization", "unsupported",
            ("zero_hpz_partition_size", "int", 1, "no secondary partition; write mics_shard_size=GPUS_PER_MACHINE"),
            ("zero_quantized_nontrainable_weights", "bool", False,
             "frozen weights are stored in 16 bits; write zero_quantized_weights=true to send them in 8 bits"),
            ("zeropp_loco_param", "section", None, "reductions have no error feedback; remove this key"),
            ("offload_optimizer.super_offload", "bool", False, "write offload_optimizer.device=cpu"),
            ("cpu_offload", "bool", False, "DeepSpeed removed this key; write offload_optimizer.device=cpu"),
            ("cpu_offload_params", "bool", False, "DeepSpeed removed this key; write offload_param.device=cpu"),
        ),
    ],
    "Activation checkpointing and the hybrid engine": [
        *_keys(
            "activation_checkpointing", "supported",
            ("partition_activations", "bool", False, "true recomputes every block in backward"),
            ("number_checkpoints", "int", None, "any number recomputes every block in backward"),
        ),
        *_keys(
            "activation_checkpointing", "ignored",
            ("contiguous_memory_optimization", "bool", False, "PYTORCH_ALLOC_CONF configures the allocator"),
            ("synchronize_checkpoint_boundary", "bool", False, "there is nothing to synchronize"),
            ("profile", "bool", False, "torch.profiler records the recomputation"),
        ),
        *_keys(
            "activation_checkpointing", "unsupported",
            ("cpu_checkpointing", "bool", False,
             "inputs of blocks stay on the device; write partition_activations=true"),
        ),
        *_keys(
            "hybrid_engine", "ignored",
            ("enabled", "bool", False, "`engine.generating()` is always available"),
            ("max_out_tokens", "int", 512, "each batch sets the size of the cache"),
            ("release_inference_cache", "bool", False, "`engine.generating(keep=False)` frees the buffers"),
            ("pin_parameters", "bool", True, "weights are gathered once per flip"),
            ("tp_gather_partition_size", "int", 8, "weights are gathered in buckets of bounded size"),
            ("enable_cuda_graph", "bool", False, "the generator uses CUDA graphs where it can"),
        ),
        *_keys(
            "hybrid_engine", "unsupported",
            ("inference_tp_size", "int", 1, "the caller of the generator splits it over ranks; write 1"),
        ),
    ],
    "Other keys": [
        *_keys(
            "", "ignored",
            ("steps_per_print", "any", None, METRICS),
            ("wall_clock_breakdown", "bool", False, METRICS),
            ("memory_breakdown", "bool", False, "`stage=plan` predicts the memory"),
            ("dump_state", "bool", False, "the run folder contains the configuration"),
            ("zero_allow_untested_optimizer", "bool", False, "optimizers that cannot work on shards are refused"),
            ("zero_force_ds_cpu_optimizer", "bool", True, "the optimizer is torch's on every device"),
            ("disable_allgather", "bool", False, BUCKETS),
            ("use_node_local_storage", "bool", False, "all ranks write a checkpoint into one folder"),
            ("seq_parallel_communication_data_type", "text", "fp32", "sequence groups send the type of the tensors"),
            ("use_data_before_expert_parallelism", "bool", False, "experts are computed on the rank of their tokens"),
            ("graph_harvesting", "bool", False, "the generator uses CUDA graphs where it can"),
            ("vocabulary_size", "int", None, "the model defines it"),
            ("timers", "section", None, METRICS),
            ("checkpoint", "section", None, "checkpoints are sharded and written in the background"),
            ("nebula", "section", None, "checkpoints are sharded and written in the background"),
            ("tensorboard", "section", None, METRICS),
            ("wandb", "section", None, METRICS),
            ("csv_monitor", "section", None, METRICS),
            ("comet", "section", None, METRICS),
            ("comms_logger", "section", None, "torch.profiler records collectives"),
            ("flops_profiler", "section", None, METRICS),
            ("aio.block_size", "int", 1048576, AIO),
            ("aio.queue_depth", "int", 8, AIO),
            ("aio.intra_op_parallelism", "int", 1, AIO),
            ("aio.thread_count", "int", 1, AIO),
            ("aio.single_submit", "bool", False, AIO),
            ("aio.overlap_events", "bool", True, AIO),
            ("aio.use_gds", "bool", False, "files are read into host memory, where the update runs"),
        ),
        *_keys(
            "", "unsupported",
            ("amp", "section", None, "NVIDIA apex is not used; write bf16.enabled or fp16.enabled"),
            ("sparse_gradients", "bool", False, "gradients are dense; write false"),
            ("sparse_attention", "section", None, "the model defines its attention; remove this section"),
            ("autotuning", "section", None, "`engine=auto` chooses the setting; remove this section"),
            ("elasticity", "section", None, "a run resumes at any number of ranks; remove this section"),
            ("curriculum_learning", "section", None, "sort the data before training; remove this section"),
            ("data_efficiency", "section", None, "sample the data before training; remove this section"),
            ("progressive_layer_drop", "section", None, "all layers are trained; remove this section"),
            ("compression_training", "section", None, "full models and LoRA adapters are trained; remove this section"),
            ("quantize_training", "section", None, "training is in bf16, fp16 or fp32; remove this section"),
            ("eigenvalue", "section", None, "part of quantize_training; remove this section"),
            ("compile", "section", None, "write EngineConfig(compile_blocks=True)"),
            ("zenflow", "section", None, "every gradient is applied in its own step; remove this section"),
            ("weight_quantization_config", "section", None, "frozen weights stay in 16 bits; remove this section"),
            ("pipeline", "section", None, "write EngineConfig(pipeline_parallel=N), or zero_optimization.stage=3"),
            ("tensor_parallel", "section", None, "write EngineConfig(tensor_parallel=N)"),
            ("sequence_parallel_size", "int", 1, "write EngineConfig(sequence_parallel=N)"),
        ),
    ],
}  # fmt: skip
KEYS: dict[str, Key] = {key.name: key for keys in SECTIONS.values() for key in keys}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer that DeepSpeed names: its name here, and its parameters with their defaults."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


ADAM = {
    "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True, "adam_w_mode": True,
    "torch_adam": False, "fused": True, "amsgrad": False, "set_grad_none": True, "fp32_optimizer_states": True,
}  # fmt: skip
ONE_BIT_ADAM = {
    "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "freeze_step": 100_000,
    "bias_correction": True, "eps_inside_sqrt": False, "amsgrad": False, "cuda_aware": False,
    "comm_backend_name": "nccl",
}  # fmt: skip
OPTIMIZERS = {
    "Adam": Optimizer("adamw", ADAM),
    "AdamW": Optimizer("adamw", ADAM),
    "Lion": Optimizer("lion", {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0}),
    "Adagrad": Optimizer("adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    "OneBitAdam": Optimizer("onebitadam", ONE_BIT_ADAM),
    "SGD": Optimizer("sgd", {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}),
}
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


def tables() -> str:
    """Return the generated part of docs/reference/deepspeed.md."""
    lines: list[str] = []
    for title, keys in SECTIONS.items():
        lines += [f"## {title}", "", "| key | default | status | |", "| --- | --- | --- | --- |"]
        lines += [_row(key) for key in sorted(keys, key=lambda key: key.status != "supported")] + [""]
    lines += ["## Optimizers (`optimizer.type`, upper or lower case)", "", "| type | parameters |", "| --- | --- |"]
    lines += [f"| {name} | {_parameters(known.parameters)} |" for name, known in OPTIMIZERS.items()]
    lines += ["| any other class of torch.optim | the arguments of the class |", "", "Unsupported:", ""]
    lines += [f"- {name}: {reason}" for name, reason in UNSUPPORTED_OPTIMIZERS.items()]
    lines += ["", "## Schedulers (`scheduler.type`)", "", "| type | parameters |", "| --- | --- |"]
    lines += [f"| {name} | {_parameters(known.parameters)} |" for name, known in SCHEDULERS.items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/reference/deepspeed.md with current tables. The text above the marker is written by hand."""
    return PAGE.read_text(encoding="utf-8").partition(MARKER)[0] + MARKER + "\n" + tables()


def _row(key: Key) -> str:
    choices = ", ".join(_shown(value) for value in key.choices if value is not None)
    note = f"{key.note}; one of {choices}" if choices else key.note
    return f"| `{key.name}` | {_shown(key.default)} | {key.status} | {note} |"


def _parameters(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" + ("" if v is None else f" {_shown(v)}") for name, v in parameters.items())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
