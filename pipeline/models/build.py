"""From a model source to an engine: built on the meta device, sharded, filled shard by shard."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import LoraConfig as PeftLora
from peft import inject_adapter_in_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from engine import Engine, EngineConfig, OptimizerConfig
from engine.config import LossScale
from engine.loading import SafetensorsFolder, copy_local, draw_parameters, read_parameters
from engine.parallel import dist
from pipeline.config.schema import EngineSettings, LoraConfig
from pipeline.errors import UserError
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import ModelSource, check_kind


@dataclass(frozen=True)
class EngineChoice:
    """How one model is run: layout, optimizer (None: frozen), adapters (None or rank 0: all parameters), dropout."""

    settings: EngineSettings
    optimizer: OptimizerConfig | None = None
    lora: LoraConfig | None = None
    dropout: float = 0.0

    def layout(self, source: ModelSource | None = None) -> dict[str, Any]:
        """Configuration, optimizer and schedule of the engine: a DeepSpeed file's, over the keys of our own.

        `source` may say how its modules are split.
        """
        file = self.settings.deepspeed
        if file is None:
            return {"config": self.engine_config(source), "optimizer": self.optimizer}
        from engine.deepspeed import read

        if self.optimizer is None:
            file = {key: value for key, value in file.items() if key not in ("optimizer", "scheduler")}
        try:
            found = read(file, ranks=dist.world().data_size, optimizer=self.optimizer, base=self.engine_config(source))
        except ValueError as error:
            raise UserError(f"engine.deepspeed: {error}") from None
        return {
            "config": found.engine,
            "optimizer": found.optimizer,
            "scheduler": found.scheduler,
            "betas": found.betas,
        }

    def engine_config(self, source: ModelSource | None = None) -> EngineConfig:
        """What the keys of `engine` say."""
        settings = self.settings
        dtype = settings.dtype
        if dtype == "auto":
            dtype = "bf16" if torch.cuda.is_available() else "fp32"
        return EngineConfig(
            zero_stage=settings.zero_stage,
            dtype=dtype,
            offload_optimizer=settings.offload_optimizer,
            offload_parameters=settings.offload_parameters,
            offload_ratio=settings.offload_ratio,
            nvme_path=settings.nvme_path,
            sub_group_size=settings.sub_group_size,
            activation_checkpointing=settings.activation_checkpointing,
            compile_blocks=settings.compile_blocks,
            shard_ranks=settings.shard_ranks,
            compress=settings.compress,
            states=settings.states,
            tensor_parallel=settings.tensor_parallel,
            tensor_plan=source.tensor_plan if source is not None else None,
            loss_scale=LossScale(initial_power=settings.loss_scale_power, window=settings.loss_scale_window),
        )


def build_policy(source: ModelSource, choice: EngineChoice, *, generates: bool = False) -> Engine:
    """An engine around a `Policy`."""
    check_kind(source, wanted="ForCausalLM")
    lm = _on_meta(source, AutoModelForCausalLM, choice)
    return Engine(
        Policy(lm),
        **choice.layout(source),
        fill=lambda module: _fill(module, "lm.", lm, source, choice),
        rollout_path="lm" if generates else None,
    )


def build_scorer(source: ModelSource, choice: EngineChoice, *, pad_id: int | None) -> Engine:
    """An engine around a `Scorer`. From a language model's weights the head is drawn anew, N(0, 1/sqrt(D + 1)).

    `pad_id` goes into the exported configuration; None where padding is the end token, which makes other tools refuse
    padded batches instead of scoring the wrong token.
    """
    source.config.num_labels = 1
    source.config.pad_token_id = pad_id
    model = _on_meta(source, AutoModelForSequenceClassification, choice)
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise UserError(
            f"{type(model).__name__} has no linear head named score; choose a model family whose sequence "
            "classification has one (OPT, GPT-2, GPT-NeoX, Llama, Qwen, Mistral, Gemma, Phi)"
        )
    return Engine(
        Scorer(model),
        **choice.layout(source),
        fill=lambda module: _fill(module, "model.", model, source, choice),
    )


def _on_meta(source: ModelSource, auto: Any, choice: EngineChoice) -> PreTrainedModel:
    config = without_dropout(source.config, choice.dropout)
    try:
        with init_empty_weights(include_buffers=False):
            model = auto.from_config(
                config,
                attn_implementation=source.attention,
                dtype=torch.float32,
                trust_remote_code=source.trust_remote_code,
            )
    except ValueError as error:
        if "scaled_dot_product_attention" in str(error):
            raise UserError(f"{source.name} has no sdpa attention in transformers: model.attention=eager") from error
        reason = str(error).partition("\n")[0]  # a list of all families follows
        raise UserError(f"model {source.name} cannot be built as a {auto.__name__}: {reason}") from error
    model.tie_weights()
    if choice.lora is not None and choice.lora.rank:
        _add_adapters(model, choice.lora)
    return model


def without_dropout(config: PretrainedConfig, rate: float) -> PretrainedConfig:
    """A copy with every dropout set to `rate` and layer drop off, whatever the family calls them."""
    clone = type(config).from_dict(config.to_dict())
    for key, value in config.to_dict().items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            if "dropout" in key or key.endswith("pdrop"):
                setattr(clone, key, rate)
            elif key.endswith("layerdrop"):
                setattr(clone, key, 0.0)
    return clone


def _add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    config = PeftLora(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes a float as well
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora.targets),
    )
    model.requires_grad_(False)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        names = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(f"lora.targets={lora.targets} matches no module; this model has {', '.join(names)}") from error
    head = getattr(model, "score", None)
    if isinstance(head, nn.Linear):
        head.requires_grad_(True)


def _targets(model: PreTrainedModel, targets: list[str] | str) -> list[str] | str:
    """`all-linear` is every linear map inside the blocks: not the head, not the value head."""
    if targets != "all-linear":
        return targets
    head = model.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module is not head and name not in ("score", "lm_head")
    ]


@torch.no_grad()
def _fill(module: nn.Module, prefix: str, model: PreTrainedModel, source: ModelSource, choice: EngineChoice) -> None:
    """Give every parameter its value. `prefix` is what our module puts before the model's own names."""
    parameters = dict(module.named_parameters())
    adapters = [name for name in parameters if ".lora_" in name]
    own = [name for name in parameters if name not in adapters]
    plain = {name: name.removeprefix(prefix).replace(".base_layer.", ".") for name in own}
    draw: list[str] = list(adapters)
    if source.folder is None:
        draw += list(plain)
    else:
        draw += _read(module, plain, model, source)
    draw_parameters(module, draw, source.seed, _initializer(model))


def _read(module: nn.Module, plain: Mapping[str, str], model: PreTrainedModel, source: ModelSource) -> list[str]:
    """Read what the folder has; return the names it lacks (only a value head may lack)."""
    assert source.folder is not None
    folder = SafetensorsFolder(source.folder)
    names = _matching(plain, set(folder.names()), model.base_model_prefix)
    lacking = [name for name in plain if name not in names]
    parameters = dict(module.named_parameters())
    if all(_is_value_head(name) for name in lacking):
        try:
            read_parameters({name: parameters[name] for name in names}, folder, names)
        except ValueError as error:
            raise UserError(str(error)) from error
        return lacking
    return _read_through_transformers(parameters, plain, model, source)


def _matching(plain: Mapping[str, str], available: set[str], base: str) -> dict[str, str]:
    """Our name -> the file's name. A base model's files lack the prefix that a model with a head has, or have it."""
    found: dict[str, str] = {}
    for name, own in plain.items():
        for candidate in (own, f"{base}.{own}", own.removeprefix(f"{base}.")):
            if candidate in available:
                found[name] = candidate
                break
    return found


def _read_through_transformers(
    parameters: Mapping[str, nn.Parameter], plain: Mapping[str, str], model: PreTrainedModel, source: ModelSource
) -> list[str]:
    """For files whose names transformers converts on the way in (fused experts, old layouts): whole, on the host."""
    auto: Any = AutoModelForSequenceClassification if hasattr(model, "score") else AutoModelForCausalLM
    loaded, report = auto.from_pretrained(
        source.folder,
        config=source.config,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # told below, in our words
        trust_remote_code=source.trust_remote_code,
    )
    _check_report(source, report)
    whole = dict(loaded.named_parameters())
    lacking = [name for name, own in plain.items() if own in report["missing_keys"]]
    for name, own in plain.items():
        if own in whole and name not in lacking:
            copy_local(parameters[name], whole[own])
    return lacking


def _check_report(source: ModelSource, report: Mapping[str, Any]) -> None:
    """Raises UserError where transformers found no value for a parameter, or one of another shape."""
    for name, there, wanted in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{source.folder}: {name} has shape {tuple(there)}, the model wants {tuple(wanted)}; "
            "its config.json does not belong to these weights"
        )
    missing = sorted(name for name in report["missing_keys"] if not _is_value_head(name))
    if missing:
        raise UserError(
            f"{source.folder}: {len(missing)} parameters are in no file, {missing[0]} for one; "
            "the weights do not belong to this config.json, or the download is incomplete"
        )


def _is_value_head(name: str) -> bool:
    return name.split(".")[-2:] == ["score", "weight"]


def _initializer(model: PreTrainedModel) -> Callable[[nn.Module, str], None]:
    """How one module's parameters are drawn: LoRA's B zero, a value head narrow, the rest as the family does."""

    def initialize(module: nn.Module, name: str) -> None:
        if ".lora_B" in name:
            return
        if ".lora_A" in name and isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        elif name.rpartition(".")[2] == "score" and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.0 / math.sqrt(module.in_features + 1))
        else:
            model._init_weights(module)

    return initialize


@contextmanager
def adapters_off(engine: Engine) -> Iterator[None]:
    """The model under its adapters: the reference of a LoRA policy."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in engine.module.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
