"""Engines from model sources: a model is created on the meta device, sharded, and filled shard by shard."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_liger_kernel_available

from engine import Engine, EngineConfig, OptimizerConfig, distributed, kernels
from pipeline.config.schema import EngineSettings
from pipeline.config.stage_sections import LoraConfig
from pipeline.errors import UserError
from pipeline.installation import pip_install
from pipeline.models.adapters import add_adapters
from pipeline.models.checks import warn_once
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import ModelSource, check_kind, own_field
from pipeline.models.weights import empty_model, fill, is_reward_model

NO_SCORER = (
    "Set reward_model= to a model with such a head (OPT, GPT-2, GPT-NeoX, Llama, Qwen, Mistral, Gemma, Phi) and the "
    "same tokenizer, or use a reward function without a critic (ppo.reward_model=false "
    "ppo.reward_function=FILE.py:NAME ppo=grpo), or method=dpo"
)

DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def natural_precision() -> str:
    """Return the precision for `engine.dtype=auto`: fp32 on CPUs, bf16 on GPUs that compute it, else fp16."""
    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"


@dataclass(frozen=True)
class EngineChoice:
    """The options of an engine: settings, optimizer, adapters and dropout.

    optimizer: None for a frozen model
    lora: None or rank 0 for a model without adapters, of which all parameters are trained
    dropout: the rate of every dropout layer
    """

    settings: EngineSettings
    optimizer: OptimizerConfig | None = None
    lora: LoraConfig | None = None
    dropout: float = 0.0

    def layout(self, source: ModelSource | None = None) -> dict[str, Any]:
        """Return the keyword arguments of `Engine`. A DeepSpeed file also sets the schedule.

        Values of the DeepSpeed file (`engine.deepspeed`) take precedence over the other keys of `engine`. `source` has
        the plan for tensor parallelism. Raises UserError if the DeepSpeed file is invalid.
        """
        if self.settings.deepspeed is None:
            return {"config": EngineConfig(**self._fields(source)), "optimizer": self.optimizer}
        from engine import deepspeed_json

        file = self.settings.deepspeed_file(trains=self.optimizer is not None)
        shares = distributed.world().data_size
        try:
            parsed = deepspeed_json.parse(file, ranks=shares, optimizer=self.optimizer, base=self._fields(source))
        except ValueError as error:
            raise UserError(f"engine.deepspeed: {error}") from None
        return {"config": parsed.engine, "optimizer": parsed.optimizer, "scheduler": parsed.scheduler}

    def _fields(self, source: ModelSource | None) -> dict[str, Any]:
        """Return the keys of `engine` as fields of an `EngineConfig`."""
        plan = source.tensor_plan if source is not None else None
        dtype = natural_precision() if self.settings.dtype == "auto" else self.settings.dtype
        return self.settings.engine_fields() | {"dtype": dtype, "tensor_plan": plan}


def build_policy(source: ModelSource, choice: EngineChoice, *, generates: bool = False) -> Engine:
    """Return an engine around a `Policy` with the weights of a source.

    `generates` creates an engine that can generate. Raises UserError if the source is not a language model.
    """
    check_kind(source, wanted="ForCausalLM")
    lm = _on_meta(source, AutoModelForCausalLM, choice)
    return Engine(
        Policy(lm),
        **choice.layout(source),
        fill=lambda module: fill(module, "lm.", lm, source),
        rollout_path="lm" if generates else None,
    )


def build_scorer(
    source: ModelSource,
    choice: EngineChoice,
    *,
    pad_id: int | None,
    zero_head: bool = False,
    shift: float = 0.0,
    scale: float = 1.0,
) -> Engine:
    """Return an engine around a `Scorer` with the weights of a source.

    A value head that the source lacks is sampled with mean 0 and standard deviation 1 / sqrt(D + 1). With `zero_head`
    the head is zero instead. `shift` and `scale` change every value, see `Scorer`. `pad_id` is written to the exported
    configuration. It is None if the padding token ends answers: other tools then refuse padded batches instead of
    scoring the wrong token. Raises UserError if the model's family has no linear head named score, or if the source is
    a classifier with several labels.
    """
    _check_labels(source)
    source.config.num_labels = 1
    source.config.pad_token_id = source.config.get_text_config().pad_token_id = pad_id
    model = _on_meta(source, AutoModelForSequenceClassification, choice)
    _check_head(model)
    return Engine(
        Scorer(model, shift=shift, scale=scale),
        **choice.layout(source),
        fill=lambda module: fill(module, "model.", model, source, zero_head=zero_head),
    )


def check_scores(source: ModelSource) -> None:
    """Raise UserError if a model's family supports neither a reward model nor a critic."""
    _check_labels(source)
    config = without_dropout(source.config, 0.0)
    config.num_labels = 1
    _check_head(_empty(source, config, AutoModelForSequenceClassification))


def check_adapters(source: ModelSource, lora: LoraConfig, *, scores: bool) -> None:
    """Raise UserError if no module of a model matches the targets of the adapters.

    `scores` selects the model with a value head instead of the language model.
    """
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    add_adapters(_empty(source, without_dropout(source.config, 0.0), auto), lora)


def _check_labels(source: ModelSource) -> None:
    if is_reward_model(source) and source.config.num_labels != 1:
        raise UserError(
            f"{source.folder} has a classifier with {source.config.num_labels} labels, but a reward model has one "
            "score (num_labels=1): set the folder of a reward model, for example RUN/reward, or score with the "
            "classifier in ppo.reward_function=FILE.py:NAME"
        )


def _check_head(model: PreTrainedModel) -> None:
    if not isinstance(getattr(model, "score", None), nn.Linear) or model.base_model is model:
        raise UserError(f"{type(model).__name__} has no linear head named score. {NO_SCORER}")


def _on_meta(source: ModelSource, auto: Any, choice: EngineChoice) -> PreTrainedModel:
    """Return the model without values, with adapters if chosen. Raises UserError for an unsupported model."""
    config = without_dropout(source.config, choice.dropout)
    heads = own_field(config, "num_attention_heads")
    if isinstance(heads, int):
        distributed.check_heads(heads, choice.settings.sequence_parallel)
    if own_field(config, "attn_logit_softcapping") is not None and source.attention == "sdpa":
        # older versions of transformers ignore the cap without a warning
        raise UserError(f"{source.name} caps attention scores, which sdpa does not support: set model.attention=eager")
    model = _empty(source, config, auto)
    if _should_fuse(source.fused_kernels):
        fuse_kernels(model)
    if choice.lora is not None and choice.lora.rank:
        add_adapters(model, choice.lora)
    if source.quantize != "none":
        from pipeline.models.quantized import quantize_linears  # imported here because most runs have no 4-bit model

        quantize_linears(model)
    return model


def _should_fuse(fused_kernels: str) -> bool:
    """Return whether to use Liger Kernel, by default where Triton can compile kernels.

    Raises UserError if it is required and this machine cannot run it.
    """
    lacks = [] if torch.cuda.is_available() else ["a GPU"]
    lacks += [] if is_liger_kernel_available() else [f"the package liger-kernel ({pip_install('gpu')})"]
    if fused_kernels == "liger" and lacks:
        raise UserError(
            f"model.fused_kernels=liger needs {' and '.join(lacks)}, which this machine does not have: "
            "set model.fused_kernels=auto"
        )
    return fused_kernels == "liger" or (fused_kernels == "auto" and not lacks and kernels.has_triton())


def fuse_kernels(model: PreTrainedModel) -> None:
    """Replace a model's norms, rotary embedding and gates by Liger Kernel's (Hsu et al., 2024, arXiv:2410.10989).

    By default, Liger Kernel replaces what it supports of a family, which may be nothing. Its gates compute SiLU,
    whatever the configuration has, and models that are built later lose the biases beside them. Experts remain those
    of transformers: the host waits for Liger's, so no CUDA graph could contain them. The model's own losses are not
    used.
    """
    from transformers.integrations.liger import apply_liger_kernel

    has_experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    is_silu = own_field(model.config, "hidden_act") in ("silu", "swish") and not own_field(model.config, "mlp_bias")
    fused = {"swiglu": is_silu and not has_experts, "cross_entropy": False, "fused_linear_cross_entropy": False}
    try:
        apply_liger_kernel(model.get_decoder(), fused)
    except Exception as reason:  # its patches expect the classes of some versions of transformers
        warn_once(f"{type(model).__name__} runs without Liger Kernel, more slowly: {reason}")


def _empty(source: ModelSource, config: PretrainedConfig, auto: Any) -> PreTrainedModel:
    """Return the model with tied parameters on the meta device.

    Raises UserError if its weights are quantized, or if transformers cannot create it.
    """
    if source.folder is not None and (quantization := getattr(source.config, "quantization_config", None)) is not None:
        method = quantization.get("quant_method", "") if isinstance(quantization, dict) else type(quantization).__name__
        raise UserError(
            f"{source.folder} has quantized weights ({method}), which cannot be trained: set model.path to the "
            "original model in 16 or 32 bits"
        )
    try:
        return empty_model(auto, config, source, attn_implementation=source.attention)
    except Exception as error:  # wrong configurations and missing packages raise errors of many types
        if "scaled_dot_product_attention" in str(error):
            raise UserError(
                f"{source.name} has no sdpa attention in transformers: set model.attention=eager"
            ) from error
        if auto is AutoModelForSequenceClassification and "Unrecognized configuration class" in str(error):
            cause = f"transformers has no sequence classification of {source.config.model_type}"
            raise UserError(f"{source.name} cannot be a reward model or a critic: {cause}. {NO_SCORER}") from error
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")  # the rest is advice
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"model {source.name} cannot be built as a {auto.__name__}: {kind}{reason}") from error


def without_dropout(config: PretrainedConfig, rate: float) -> PretrainedConfig:
    """Return a copy of a configuration with every dropout rate set to `rate`, and layer drop set to 0.

    The names of the fields identify dropout and layer drop, because each family names them differently. The language
    model of a multimodal configuration has fields of its own.
    """
    clone = type(config).from_dict(config.to_dict())
    for part in (clone, clone.get_text_config()):
        for key, value in part.to_dict().items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                if "dropout" in key or key.endswith("pdrop"):
                    setattr(part, key, rate)
                elif key.endswith("layerdrop"):
                    setattr(part, key, 0.0)
    return clone
