"""Every key of a DeepSpeed configuration and what becomes of it here.

Defaults are those of DeepSpeed's code (deepspeed/runtime/zero/config.py, offload_config.py, precision_config.py,
constants.py), which differ from its manual in places. `said.py` checks a file against this table, `document.py` prints
it.
"""

from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["honoured", "accepted", "refused"]


@dataclass(frozen=True)
class Key:
    """One dotted key.

    honoured: does what it says. accepted: any value, has nothing to do here, for the reason in `note`. refused: only
    the default (or another value that switches it off) is taken; `note` says what to use instead. `only` are the values
    that an honoured key may have, where others are refused. `takes` is what a value must be.
    """

    name: str
    default: Any
    verdict: Verdict
    note: str
    takes: Literal["bool", "int", "number", "text", "list", "section", "any"] = "any"
    only: tuple[Any, ...] = ()


def _rows(verdict: Verdict, prefix: str, *rows: tuple[Any, ...]) -> list[Key]:
    """Keys of one verdict below one prefix: (name, default, takes, note[, only])."""
    return [Key(f"{prefix}{name}", default, verdict, note, takes, *rest) for name, default, takes, note, *rest in rows]


_BUCKETS = "FSDP2 gathers and reduces one block of layers at a time"
_NO_DEVICE_CODE = "the engine has no such switch to turn: FSDP2 decides"
_FP32_MASTERS = "masters, gradients and moments are fp32; leave it false"
_PLACES = (None, "none", "cpu", "nvme")
_NVME_PATH = "folder of the run's private files; the temporary folder unless said"
_PINNED = "what crosses between host and GPU is always pinned"
_AIO = "requests of a few MiB from a few threads, straight to the disk (O_DIRECT)"
_WATCH = "metrics go to metrics.jsonl and wandb (tracking=)"

BATCH = _rows(
    "honoured", "",
    ("train_batch_size", None, "int", "checked: micro-batch x accumulation x ranks. Stages have <stage>.batch_size"),
    ("train_micro_batch_size_per_gpu", None, "int",
     "for a loop's loader engine.deepspeed.read tells it (micro_batch_size). Stages have <stage>.micro_batch_tokens"),
    ("gradient_accumulation_steps", None, "int",
     "step() acts on every n-th call. Stages split a batch by tokens and need no number"),
    ("gradient_clipping", 1.0, "number", "global L2 norm; 0 does not clip"),
    ("communication_data_type", None, "text", "precision of gradient reductions; None is fp32 here",
     (None, "fp32", "bf16", "fp16", "bfp16")),
)  # fmt: skip

TRAINING = [
    *_rows(
        "accepted", "",
        ("prescale_gradients", False, "bool", "gradients are reduced in fp32 and cannot overflow on the way"),
        ("gradient_predivide_factor", 1.0, "number", "gradients are reduced in fp32 and cannot overflow on the way"),
        ("gradient_accumulation_dtype", None, "text", "gradients accumulate in fp32"),
        ("data_types.grad_accum_dtype", None, "text", "gradients accumulate in fp32"),
        ("steps_per_print", None, "any", "every step is logged (<stage>.log_every)"),
        ("wall_clock_breakdown", False, "bool", "seconds by phase are always in summary.json"),
        ("memory_breakdown", False, "bool", "python -m engine.memory tells beforehand"),
        ("dump_state", False, "bool", "the whole configuration is in the run folder"),
        ("zero_allow_untested_optimizer", False, "bool", "optimizers that can't work on shards are refused by name"),
        ("zero_force_ds_cpu_optimizer", True, "bool", "the optimizer is torch's fused one on every device"),
        ("disable_allgather", False, "bool", _BUCKETS),
        ("dataloader_drop_last", False, "bool", "the data loader is the caller's"),
        ("use_node_local_storage", False, "bool", "rank folders of a checkpoint are files of one folder"),
        ("fp32_allreduce", False, "bool", "gradients are reduced in fp32 anyway"),
        ("seq_parallel_communication_data_type", "fp32", "text", "what sequence groups exchange keeps its precision"),
        ("use_data_before_expert_parallelism", False, "bool", "experts are computed where their tokens are"),
        ("graph_harvesting", False, "bool", "the rollout engine decides by itself"),
        ("vocabulary_size", None, "int", "the model says it"),
        ("timers", None, "section", "seconds by phase are always in summary.json"),
        ("checkpoint", None, "section", "checkpoints are sharded, whole or absent, and written in the background"),
        ("nebula", None, "section", "checkpoints are written in the background as they are"),
        ("tensorboard", None, "section", _WATCH),
        ("wandb", None, "section", _WATCH),
        ("csv_monitor", None, "section", _WATCH),
        ("comet", None, "section", _WATCH),
        ("comms_logger", None, "section", "torch.profiler sees the collectives"),
        ("flops_profiler", None, "section", "tokens a second are logged each step"),
        ("aio.block_size", 1048576, "int", _AIO),
        ("aio.queue_depth", 8, "int", _AIO),
        ("aio.intra_op_parallelism", 1, "int", _AIO),
        ("aio.thread_count", 1, "int", _AIO),
        ("aio.single_submit", False, "bool", _AIO),
        ("aio.overlap_events", True, "bool", _AIO),
        ("aio.use_gds", False, "bool", "files are read through host memory, where the step is taken"),
    ),
    *_rows(
        "refused", "",
        ("amp", None, "section", "NVIDIA apex is not used: bf16.enabled or fp16.enabled"),
        ("sparse_gradients", False, "bool", "gradients are dense; leave it false"),
        ("sparse_attention", None, "section", "attention is the model's own (model.attention=); leave it out"),
        ("autotuning", None, "section", "python -m engine.memory shows what fits; leave it out"),
        ("elasticity", None, "section", "a run goes on at another number of ranks as it is; leave it out"),
        ("curriculum_learning", None, "section", "order the data yourself; leave it out"),
        ("data_efficiency", None, "section", "sample the data yourself; leave it out"),
        ("progressive_layer_drop", None, "section", "all layers train; leave it out"),
        ("compression_training", None, "section", "the engine trains whole models or LoRA adapters; leave it out"),
        ("quantize_training", None, "section", "the engine trains in bf16, fp16 or fp32; leave it out"),
        ("eigenvalue", None, "section", "belongs to quantize_training; leave it out"),
        ("compile", None, "section", "engine.compile_blocks=true, or EngineConfig(compile_blocks=True)"),
        ("zenflow", None, "section", "every gradient is applied at its step; leave it out"),
        ("weight_quantization_config", None, "section", "frozen weights stay in 16 bits; leave it out"),
        ("pipeline", None, "section", "engine.pipeline_parallel=N without a file, or zero_optimization.stage=3"),
        ("tensor_parallel", None, "section", "engine.tensor_parallel=N, or EngineConfig(tensor_parallel=N)"),
        ("sequence_parallel_size", 1, "int", "engine.sequence_parallel=N, or EngineConfig(sequence_parallel=N)"),
    ),
]  # fmt: skip

PRECISION = [
    *_rows(
        "honoured", "fp16.",
        ("enabled", False, "bool", "compute in fp16, fp32 masters, loss scaling"),
        ("loss_scale", 0, "number", "a fixed scale; 0 is dynamic"),
        ("initial_scale_power", 16, "int", "first scale is 2**this"),
        ("loss_scale_window", 1000, "int", "good steps before the scale doubles"),
        ("hysteresis", 2, "int", "overflows before the scale halves; stage 0 has none, in DeepSpeed as here"),
        ("consecutive_hysteresis", False, "bool", "a good step refills the hysteresis"),
        ("min_loss_scale", 1, "number", "lowest scale; an overflow there stops the run (DeepSpeed's stage 0 skips on)"),
    ),
    *_rows("accepted", "fp16.", ("auto_cast", False, "bool", "floating-point inputs are always cast")),
    *_rows("refused", "fp16.", ("fp16_master_weights_and_grads", False, "bool", _FP32_MASTERS)),
    *_rows("honoured", "bf16.", ("enabled", False, "bool", "compute in bf16, fp32 masters")),
    *_rows(
        "accepted", "bf16.",
        ("immediate_grad_update", False, "bool", "gradients are reduced in fp32 as they come"),
        ("check_grad_overflow", True, "bool", "a step with a non-finite gradient is always skipped and counted"),
    ),
    *_rows(
        "refused", "bf16.",
        ("bf16_master_weights_and_grads", False, "bool", _FP32_MASTERS),
        ("bf16_optimizer_states", False, "bool", _FP32_MASTERS),
    ),
    *_rows(
        "refused", "torch_autocast.",
        ("enabled", False, "bool", "the engine casts whole modules: bf16.enabled=true"),
        ("dtype", None, "text", "the engine casts whole modules: bf16.enabled=true"),
        ("lower_precision_safe_modules", None, "list", "the engine casts whole modules: bf16.enabled=true"),
    ),
]  # fmt: skip

ZERO = [
    *_rows(
        "honoured", "zero_optimization.",
        ("stage", 0, "int", "0 off, 1 optimizer states, 2 gradients too, 3 parameters too", (0, 1, 2, 3)),
        ("zero_quantized_weights", False, "bool", "parameters are gathered in blockwise int8 (stages 1-3)"),
        ("zero_quantized_gradients", False, "bool", "gradients travel in blockwise int8, summed in fp32 (stages 1-3)"),
        ("mics_shard_size", -1, "int", "ranks that share one copy of the model (HSDP); -1 is all"),
        ("offload_param.device", "none", "text", "where the shards live between uses (stage 3)", _PLACES),
        ("offload_param.nvme_path", None, "text", _NVME_PATH),
        ("offload_optimizer.device", "none", "text",
         "where fp32 masters and moments live, and the step is taken (stages 1-3)", _PLACES),
        ("offload_optimizer.nvme_path", None, "text", _NVME_PATH),
        ("offload_optimizer.ratio", 1.0, "number", "share of the parameters that step there; the rest on the device"),
        ("sub_group_size", 1e9, "number", f"parameters that an offloaded step takes at once; {2**23} unless said"),
    ),
    *_rows(
        "accepted", "zero_optimization.",
        ("contiguous_gradients", True, "bool", "a block's gradients are reduced out of one buffer as it is"),
        ("reduce_scatter", True, "bool", "always, from stage 1 on"),
        ("allgather_partitions", True, "bool", "always, from stage 1 on"),
        ("use_multi_rank_bucket_allreduce", True, "bool", _BUCKETS),
        ("reduce_bucket_size", 5e8, "number", _BUCKETS),
        ("allgather_bucket_size", 5e8, "number", _BUCKETS),
        ("overlap_comm", None, "bool", "always: FSDP2 reduces behind backward and gathers ahead of it"),
        ("load_from_fp32_weights", True, "bool", "masters are always loaded as they are on disk"),
        ("stage3_prefetch_bucket_size", 5e7, "number", "the next block is gathered while one computes"),
        ("stage3_param_persistence_threshold", 1e5, "number", "small parameters come with their block's gather"),
        ("stage3_model_persistence_threshold", None, "number", "small parameters come with their block's gather"),
        ("stage3_max_live_parameters", 1e9, "number", "two blocks at most are whole at once"),
        ("stage3_max_reuse_distance", 1e9, "number", "a block is released after use and gathered again in backward"),
        ("stage3_gather_16bit_weights_on_model_save", False, "bool", "export always writes whole weights"),
        ("stage3_gather_fp16_weights_on_model_save", False, "bool", "export always writes whole weights"),
        ("stage3_module_granularity_threshold", 0, "int", "the elements of nn.ModuleList are the grain"),
        ("stage3_use_all_reduce_for_fetch_params", False, "bool", _NO_DEVICE_CODE),
        ("stage3_allgather_sequential", False, "bool", _NO_DEVICE_CODE),
        ("ignore_unused_parameters", True, "bool", "parameters without a gradient are left alone"),
        ("round_robin_gradients", False, "bool", _BUCKETS),
        ("legacy_stage1", False, "bool", "there is one stage 1"),
        ("elastic_checkpoint", False, "bool", "checkpoints load at any number of ranks"),
        ("memory_efficient_linear", True, "bool", _NO_DEVICE_CODE),
        ("override_module_apply", True, "bool", "modules are built on the meta device"),
        ("pipeline_loading_checkpoint", False, "bool", "each rank reads its own slices"),
        ("mics_hierarchical_params_gather", False, "bool", "NCCL chooses the way of a gather"),
        ("enable_sanity_checks", False, "bool", _NO_DEVICE_CODE),
        ("log_trace_cache_warnings", False, "bool", _NO_DEVICE_CODE),
        ("leaf_module", None, "section", "the elements of nn.ModuleList are the grain"),
        ("cpu_offload_use_pin_memory", None, "bool", _PINNED),
        ("offload_param.buffer_count", 5, "int", "shards are mapped files: the page cache is the buffer"),
        ("offload_param.buffer_size", 1e8, "number", "shards are mapped files: the page cache is the buffer"),
        ("offload_param.max_in_cpu", 1e9, "number", "shards are mapped files: the page cache is the buffer"),
        ("offload_param.pin_memory", True, "bool", _PINNED),
        ("offload_optimizer.buffer_count", 4, "int", "a few sub-groups are always in flight: sub_group_size"),
        ("offload_optimizer.pin_memory", True, "bool", _PINNED),
        ("offload_optimizer.pipeline_read", False, "bool", "reads always go ahead of the step"),
        ("offload_optimizer.pipeline_write", False, "bool", "writes always go on behind the step"),
        ("offload_optimizer.fast_init", False, "bool", "moments are first written by the first step"),
        ("offload_optimizer.cpuadam_cores_perc", 0.8, "number", "OMP_NUM_THREADS says how many cores torch takes"),
    ),
    *_rows(
        "refused", "zero_optimization.",
        ("zero_hpz_partition_size", 1, "int", "no second copy inside a node: mics_shard_size=GPUS_A_NODE keeps "
         "gathers inside it"),
        ("zero_quantized_nontrainable_weights", False, "bool", "zero_quantized_weights=true sends frozen weights in 8 "
         "bits too, and keeps them in 16"),
        ("zeropp_loco_param", None, "section", "reductions have no error feedback; leave it out"),
        ("offload_optimizer.super_offload", False, "bool", "offload_optimizer.device=cpu; leave it false"),
        ("cpu_offload", False, "bool", "DeepSpeed gave this key up: offload_optimizer.device=cpu"),
        ("cpu_offload_params", False, "bool", "DeepSpeed gave this key up: offload_param.device=cpu"),
    ),
]  # fmt: skip

OTHERS = [
    *_rows(
        "honoured", "activation_checkpointing.",
        ("partition_activations", False, "bool", "true recomputes every block; kept inputs stay with their rank"),
        ("number_checkpoints", None, "int", "any number recomputes every block"),
    ),
    *_rows(
        "accepted", "activation_checkpointing.",
        ("contiguous_memory_optimization", False, "bool", "the allocator's matter: PYTORCH_ALLOC_CONF"),
        ("synchronize_checkpoint_boundary", False, "bool", "nothing to synchronize"),
        ("profile", False, "bool", "torch.profiler sees it"),
    ),
    *_rows(
        "refused", "activation_checkpointing.",
        ("cpu_checkpointing", False, "bool", "kept inputs stay on the device: partition_activations=true recomputes"),
    ),
    *_rows(
        "accepted", "hybrid_engine.",
        ("enabled", False, "bool", "engine.generating() is always there"),
        ("max_out_tokens", 512, "int", "the cache is sized by each batch (rollout.max_new_tokens)"),
        ("release_inference_cache", False, "bool", "engine.generating(keep=False) frees its buffers"),
        ("pin_parameters", True, "bool", "weights are gathered once a flip"),
        ("tp_gather_partition_size", 8, "int", "each rank writes its own rows into the generator"),
        ("enable_cuda_graph", False, "bool", "the rollout engine decides by itself"),
    ),
    *_rows(
        "refused", "hybrid_engine.",
        ("inference_tp_size", 1, "int", "rollout.tensor_parallel=N splits the generator; leave it 1"),
    ),
]  # fmt: skip

KEYS: dict[str, Key] = {key.name: key for key in [*BATCH, *PRECISION, *ZERO, *OTHERS, *TRAINING]}
