"""A user's DeepSpeed configuration becomes the engine's own values, or one message says what to write instead.

Order: the file is opened and every key is checked (`said.py`), "auto" and absent keys are filled from the caller's own
settings (else DeepSpeed's defaults), and what is left is translated.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import Compress, EngineConfig, LossScale, OptimizerConfig, Precision
from engine.deepspeed import optimizers, schedulers
from engine.deepspeed.keys import KEYS
from engine.deepspeed.refusals import number_of, section_of
from engine.deepspeed.said import Said, open_file, remarks


@dataclass(frozen=True)
class Choices:
    """What a file comes to.

    `optimizer` is None where neither file nor caller has one, `scheduler` and `betas` where the file has none. The
    batch sizes, in rows, are for the caller's loader: the engine needs none. They are None where the file leaves them
    open. `notes` has one line for each key that does nothing here.
    """

    engine: EngineConfig
    optimizer: OptimizerConfig | None
    scheduler: Callable[[int], float] | None
    betas: Callable[[int], tuple[float, float]] | None
    micro_batch_size: int | None
    train_batch_size: int | None
    notes: tuple[str, ...]


def read(
    config: Mapping[str, Any] | str | Path,
    *,
    ranks: int | None = 1,
    optimizer: OptimizerConfig | None = None,
    base: EngineConfig | Mapping[str, Any] | None = None,
) -> Choices:
    """Check a configuration and translate it. Raises ValueError with what to write instead.

    `optimizer` and `base` are the caller's own settings for what the file leaves open; without `base` DeepSpeed's
    defaults hold (stage 0, fp32). Fields that may only with the file's make an `EngineConfig` are given by name.
    `ranks=None` leaves the batch sizes alone, where nobody knows the ranks yet.
    """
    raw = dict(config) if isinstance(config, Mapping) else open_file(config)
    base = EngineConfig(dtype="fp32") if base is None else base
    engine = EngineConfig(**fields_over(raw, vars(base) if isinstance(base, EngineConfig) else base))
    said = Said(raw)
    micro, accumulation, whole = _batch_triple(said, ranks) if ranks is not None else (None, None, None)
    if accumulation is not None:
        engine = replace(engine, gradient_accumulation=accumulation)
    clipping = said.get("gradient_clipping")
    if clipping is not None:
        clipping = number_of("gradient_clipping", clipping, 0.0)
    chosen = optimizer if clipping is None or optimizer is None else replace(optimizer, max_grad_norm=clipping)
    if section := section_of("optimizer", raw.get("optimizer")):
        chosen = optimizers.translate(section, optimizer, clipping)
    rates = schedulers.Rates(None, None)
    if section := section_of("scheduler", raw.get("scheduler")):
        if chosen is None:
            raise ValueError("scheduler: there is no optimizer to schedule; add the optimizer section, or optimizer=")
        rates = schedulers.translate(section, chosen)
    return Choices(engine, chosen, rates.lr, rates.betas, micro, whole, tuple(notes(raw)))


def checked(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The content of a file that can be read, before anybody knows ranks or steps. Raises ValueError."""
    raw = dict(config) if isinstance(config, Mapping) else open_file(config)
    read(raw, ranks=None, optimizer=OptimizerConfig(lr=1e-5, total_steps=1))
    return raw


def _batch_triple(said: Said, ranks: int) -> tuple[int | None, int | None, int | None]:
    """(micro-batch, accumulation, global batch): any two make the third. Raises ValueError where three don't agree."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    for name in names:
        value = said.get(name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    micro, steps, whole = (None if said.get(name) is None else int(said.get(name)) for name in names)
    if whole is not None:
        if micro is None:
            micro = whole // (ranks * (steps or 1))
            steps = steps or 1
        steps = steps or whole // (micro * ranks)
        if micro * steps * ranks != whole:
            raise ValueError(
                f"train_batch_size={whole} is not micro-batch {micro} x accumulation {max(1, steps)} x {ranks} ranks; "
                f"train_batch_size={max(1, micro) * max(1, steps) * ranks} would be, or leave one of the three out"
            )
    elif micro is not None:
        steps = steps or 1
        whole = micro * steps * ranks
    return micro, steps, whole


def fields_over(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an `EngineConfig` as a file has them, over the caller's own; whether they go together is not asked.

    Raises ValueError for a file that can't be by itself.
    """
    said = Said(config)
    said.check()
    base = vars(EngineConfig()) | dict(own)
    stage = said.get("zero_optimization.stage")
    stage = base["zero_stage"] if stage is None else int(stage)
    reduce = {None: base["reduce_dtype"], "fp32": "fp32", "bf16": "bf16", "bfp16": "bf16", "fp16": "fp16"}
    shard = said.get("zero_optimization.mics_shard_size")
    recompute = said.get("activation_checkpointing.partition_activations")
    recompute = bool(recompute) or said.get("activation_checkpointing.number_checkpoints") is not None
    return {
        **base,
        "zero_stage": stage,
        "dtype": _dtype(said, base["dtype"]),
        **_offload(said, stage, base),
        "activation_checkpointing": recompute or base["activation_checkpointing"],
        "loss_scale": _loss_scale(said, stage, base["loss_scale"]),
        "reduce_dtype": reduce[said.get("communication_data_type")],
        "shard_ranks": base["shard_ranks"] if shard is None or shard < 1 else int(shard),
        "compress": _compress(said, base["compress"]),
    }


def _compress(said: Said, own: Compress) -> Compress:
    """ZeRO++'s keys, where the file has one of them."""
    weights = said.get("zero_optimization.zero_quantized_weights")
    gradients = said.get("zero_optimization.zero_quantized_gradients")
    if weights is None and gradients is None:
        return own
    if weights and gradients:
        return "both"
    return "gather8" if weights else "reduce8" if gradients else "none"


def _dtype(said: Said, own: Precision) -> Precision:
    fp16, bf16 = said.get("fp16.enabled"), said.get("bf16.enabled")
    if fp16 and bf16:
        raise ValueError("fp16.enabled and bf16.enabled are both true; keep one")
    if fp16 or bf16:
        return "fp16" if fp16 else "bf16"
    return "fp32" if fp16 is False and bf16 is False else own


def _offload(said: Said, stage: int, base: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's offload keys that the file speaks of."""
    section = "zero_optimization"
    optimizer, shards = (said.get(f"{section}.offload_{part}.device") for part in ("optimizer", "param"))
    if shards in ("cpu", "nvme") and stage != 3:
        raise ValueError(f"{section}.offload_param.device={shards} needs {section}.stage=3, not {stage}")
    if optimizer in ("cpu", "nvme") and stage == 0:
        raise ValueError(f"{section}.offload_optimizer.device={optimizer} needs {section}.stage=1, 2 or 3")
    paths = {said.get(f"{section}.offload_{part}.nvme_path") for part in ("optimizer", "param")} - {None}
    if len(paths) > 1:
        raise ValueError(f"{section}: offload_optimizer.nvme_path and offload_param.nvme_path differ; name one folder")
    ratio, sub_group = said.get(f"{section}.offload_optimizer.ratio"), said.get(f"{section}.sub_group_size")
    return {
        "offload_optimizer": optimizer or base["offload_optimizer"],
        "offload_parameters": shards or base["offload_parameters"],
        "offload_ratio": base["offload_ratio"] if ratio is None else float(ratio),
        "nvme_path": next(iter(paths), base["nvme_path"]),
        "sub_group_size": base["sub_group_size"] if sub_group is None else int(sub_group),
    }


def _loss_scale(said: Said, stage: int, own: LossScale) -> LossScale:
    """DeepSpeed's scale, where the file speaks of fp16; its stage 0 has no hysteresis."""
    if not any(key.startswith("fp16.") for key in said.values):
        return own
    fixed = float(said.value("fp16.loss_scale"))
    try:
        return LossScale(
            initial_power=int(said.value("fp16.initial_scale_power")),
            window=int(said.value("fp16.loss_scale_window")),
            hysteresis=1 if stage == 0 else int(said.value("fp16.hysteresis")),
            minimum=float(said.value("fp16.min_loss_scale")),
            refill=bool(said.value("fp16.consecutive_hysteresis")),
            static=fixed or None,
        )
    except ValueError as problem:
        raise ValueError(f"fp16: {problem}") from None


def notes(config: Mapping[str, Any]) -> Iterator[str]:
    """One line for every key that is accepted and asks for something that is not done, and for every remark."""
    yield from (f"{name} is taken for a remark" for name in remarks(config))
    for name, value in Said(config).values.items():
        key = KEYS[name]
        if key.verdict == "accepted" and value is not None and value != key.default:
            yield f"{name} has nothing to do here: {key.note}"
