"""The tables of a DeepSpeed configuration: its keys, and the parameters of its optimizers and schedulers.

docs/reference/deepspeed.md describes all of them. Defaults are those of DeepSpeed's code
(deepspeed/runtime/zero/config.py, offload_config.py, precision_config.py, constants.py). They differ from its manual in
places.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from engine.schedules import SCHEDULES


@dataclass(frozen=True)
class Key:
    """A key: its JSON type, or "ignored" (no effect), or "unsupported" (only a value that switches it off is accepted).

    `field` is the field of `EngineConfig`, in the section `fp16` of `LossScale`. A key without a field sets several
    fields, or one field with other keys. `note` says what to write instead of an unsupported key.
    """

    kind: Literal["bool", "int", "number", "text", "pair", "ignored", "unsupported"]
    field: str | None = None
    choices: tuple[str | int, ...] = ()
    minimum: float | None = None
    note: str = ""


DEVICES = ("none", "cpu", "nvme")
SUPPORTED: dict[str, Key] = {
    "train_batch_size": Key("int", minimum=1),
    "train_micro_batch_size_per_gpu": Key("int", minimum=1),
    "gradient_accumulation_steps": Key("int", minimum=1),
    "gradient_clipping": Key("number", minimum=0),
    "communication_data_type": Key("text", "reduce_dtype", ("fp32", "bf16", "fp16", "bfp16")),
    "dataloader_drop_last": Key("bool"),
    "fp16.enabled": Key("bool"),
    "fp16.loss_scale": Key("number", "static"),
    "fp16.initial_scale_power": Key("int", "initial_power"),
    "fp16.loss_scale_window": Key("int", "window"),
    "fp16.hysteresis": Key("int", "hysteresis"),
    "fp16.consecutive_hysteresis": Key("bool", "refill"),
    "fp16.min_loss_scale": Key("number", "minimum"),
    "bf16.enabled": Key("bool"),
    "zero_optimization.stage": Key("int", "zero_stage", (0, 1, 2, 3)),
    "zero_optimization.zero_quantized_weights": Key("bool"),
    "zero_optimization.zero_quantized_gradients": Key("bool"),
    "zero_optimization.mics_shard_size": Key("int", "shard_ranks"),
    "zero_optimization.offload_param.device": Key("text", "offload_parameters", DEVICES),
    "zero_optimization.offload_param.nvme_path": Key("text", "nvme_path"),
    "zero_optimization.offload_optimizer.device": Key("text", "offload_optimizer", DEVICES),
    "zero_optimization.offload_optimizer.nvme_path": Key("text", "nvme_path"),
    "zero_optimization.offload_optimizer.ratio": Key("number", "offload_ratio"),
    "zero_optimization.sub_group_size": Key("int", "sub_group_size"),
    "activation_checkpointing.partition_activations": Key("bool"),
    "activation_checkpointing.number_checkpoints": Key("int"),
}

IGNORED: dict[str, str] = {
    "": "prescale_gradients gradient_predivide_factor fp32_allreduce gradient_accumulation_dtype data_types "
    "steps_per_print wall_clock_breakdown timers tensorboard wandb csv_monitor comet flops_profiler memory_breakdown "
    "comms_logger dump_state use_node_local_storage checkpoint nebula zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer disable_allgather graph_harvesting aio seq_parallel_communication_data_type "
    "use_data_before_expert_parallelism vocabulary_size",
    "fp16.": "auto_cast",
    "bf16.": "immediate_grad_update check_grad_overflow",
    "zero_optimization.": "reduce_bucket_size allgather_bucket_size use_multi_rank_bucket_allreduce "
    "contiguous_gradients round_robin_gradients stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_module_granularity_threshold leaf_module stage3_use_all_reduce_for_fetch_params "
    "stage3_allgather_sequential memory_efficient_linear enable_sanity_checks log_trace_cache_warnings legacy_stage1 "
    "override_module_apply mics_hierarchical_params_gather overlap_comm reduce_scatter allgather_partitions "
    "ignore_unused_parameters cpu_offload_use_pin_memory stage3_gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
    "zero_optimization.offload_param.": "pin_memory buffer_count buffer_size max_in_cpu",
    "zero_optimization.offload_optimizer.": "pin_memory pipeline_read pipeline_write buffer_count fast_init "
    "cpuadam_cores_perc",
    "activation_checkpointing.": "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
    "hybrid_engine.": "enabled release_inference_cache max_out_tokens pin_parameters tp_gather_partition_size "
    "enable_cuda_graph",
}
"""Names of keys without effect, by section. The page has the reasons."""

MASTERS = "master weights, gradients and optimizer states are fp32; write false"
REMOVE = "remove this section"
UNSUPPORTED: dict[str, str] = {
    "fp16.fp16_master_weights_and_grads": MASTERS,
    "bf16.bf16_master_weights_and_grads": MASTERS,
    "bf16.bf16_optimizer_states": MASTERS,
    "torch_autocast": "write bf16.enabled=true",
    "amp": "write bf16.enabled=true or fp16.enabled=true",
    "zero_optimization.zero_hpz_partition_size": "write mics_shard_size=GPUS_PER_MACHINE",
    "zero_optimization.zero_quantized_nontrainable_weights": "write zero_quantized_weights=true",
    "zero_optimization.zeropp_loco_param": "reductions have no error feedback; remove this key",
    "zero_optimization.offload_optimizer.super_offload": "write offload_optimizer.device=cpu",
    "zero_optimization.cpu_offload": "write offload_optimizer.device=cpu",
    "zero_optimization.cpu_offload_params": "write offload_param.device=cpu",
    "activation_checkpointing.cpu_checkpointing": "write partition_activations=true",
    "hybrid_engine.inference_tp_size": "write 1",
    "sparse_gradients": "write false",
    "autotuning": "`engine=auto` chooses the setting; remove this section",
    "elasticity": "a run resumes at any number of ranks; remove this section",
    "curriculum_learning": "sort the data before training; remove this section",
    "data_efficiency": "sample the data before training; remove this section",
    "compile": "write EngineConfig(compile_blocks=True)",
    "pipeline": "write EngineConfig(pipeline_parallel=N), or zero_optimization.stage=3",
    "tensor_parallel": "write EngineConfig(tensor_parallel=N)",
    "sequence_parallel_size": "write EngineConfig(sequence_parallel=N)",
    **dict.fromkeys(
        ("sparse_attention", "progressive_layer_drop", "compression_training", "quantize_training"), REMOVE
    ),
    **dict.fromkeys(("eigenvalue", "zenflow", "weight_quantization_config"), REMOVE),
}

KEYS: dict[str, Key] = {
    **SUPPORTED,
    **{section + name: Key("ignored") for section, names in IGNORED.items() for name in names.split()},
    **{name: Key("unsupported", note=remedy) for name, remedy in UNSUPPORTED.items()},
}

ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True, "amsgrad": False}
TORCH_ADAM = ADAM | {
    "adam_w_mode": True, "torch_adam": False, "fused": True, "set_grad_none": True, "fp32_optimizer_states": True,
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": TORCH_ADAM,
    "AdamW": TORCH_ADAM,
    "Lion": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
    "Adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "OneBitAdam": ADAM | {
        "freeze_step": 100_000, "eps_inside_sqrt": False, "cuda_aware": False, "comm_backend_name": "nccl",
    },
    "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}  # fmt: skip
"""The parameters of the optimizers that DeepSpeed names, with their defaults."""
SCHEDULERS: dict[str, dict[str, Any]] = {
    name: {field.name: None if field.default is MISSING else field.default for field in fields(schedule)}
    for name, schedule in SCHEDULES.items()
}

PARAMETERS: dict[str, Key] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), Key("number", minimum=0)),
    "betas": Key("pair", minimum=0),
    "bias_correction": Key("bool", choices=(True,)),
    "eps_inside_sqrt": Key("bool", choices=(False,)),
    "OneBitAdam.amsgrad": Key("bool", choices=(False,)),
    "freeze_step": Key("int", minimum=1),
    **dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_min_ratio", "cos_min_ratio"), Key("number")),
    "warmup_num_steps": Key("int", minimum=0),
    "total_num_steps": Key("int", minimum=1),
    "warmup_type": Key("text", choices=("log", "linear")),
}
"""Types and values of parameters; those that are absent here go to the optimizer unchanged."""
