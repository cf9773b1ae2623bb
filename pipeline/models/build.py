"""From a model source to an engine: built on the meta device, sharded, filled shard by shard."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from engine import Engine, EngineConfig, OptimizerConfig, deepspeed_json, distributed
from pipeline.config.engines import deepspeed_for, engine_fields
from pipeline.config.schema import EngineSettings, LoraConfig
from pipeline.distributed import data_share
from pipeline.errors import UserError
from pipeline.models.adapters import add_adapters
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import ModelSource, check_kind, own_field
from pipeline.models.weights import fill

NO_SCORER = (
    "Take a model for it that has one (OPT, GPT-2, GPT-NeoX, Llama, Qwen, Mistral, Gemma, Phi) and this tokenizer "
    "(reward_model=), or a function that scores and no critic (ppo.reward_model=false ppo.reward_function=FILE.py:NAME "
    "ppo=grpo)"
)


def natural_precision() -> str:
    """Return the precision for `engine.dtype=auto`: fp32 on CPUs, bf16 on GPUs that compute it, else fp16."""
    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"


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
        if self.settings.deepspeed is None:
            return {"config": EngineConfig(**self._fields(source)), "optimizer": self.optimizer}
        file, (_, shares) = deepspeed_for(self.settings.deepspeed, self.optimizer), data_share()
        try:
            found = deepspeed_json.parse(file, ranks=shares, optimizer=self.optimizer, base=self._fields(source))
        except ValueError as error:
            raise UserError(f"engine.deepspeed: {error}") from None
        return {
            "config": found.engine,
            "optimizer": found.optimizer,
            "scheduler": found.scheduler,
            "betas": found.betas,
        }

    def _fields(self, source: ModelSource | None) -> dict[str, Any]:
        """What the keys of `engine` say, as fields of an `EngineConfig`."""
        dtype = natural_precision() if self.settings.dtype == "auto" else self.settings.dtype
        plan = source.tensor_plan if source is not None else None
        return engine_fields(self.settings) | {"dtype": dtype, "tensor_plan": plan}


def build_policy(source: ModelSource, choice: EngineChoice, *, generates: bool = False) -> Engine:
    """An engine around a `Policy`."""
    check_kind(source, wanted="ForCausalLM")
    lm = _on_meta(source, AutoModelForCausalLM, choice)
    return Engine(
        Policy(lm),
        **choice.layout(source),
        fill=lambda module: fill(module, "lm.", lm, source),
        rollout_path="lm" if generates else None,
    )


def build_scorer(source: ModelSource, choice: EngineChoice, *, pad_id: int | None, zero_head: bool = False) -> Engine:
    """An engine around a `Scorer`. From a language model's weights the head is drawn anew, N(0, 1/sqrt(D + 1)), or is
    zero.

    `pad_id` goes into the exported configuration; None where padding is the end token, which makes other tools refuse
    padded batches instead of scoring the wrong token.
    """
    source.config.num_labels = 1
    source.config.pad_token_id = pad_id
    model = _on_meta(source, AutoModelForSequenceClassification, choice)
    _check_head(model)
    return Engine(
        Scorer(model),
        **choice.layout(source),
        fill=lambda module: fill(module, "model.", model, source, zero_head=zero_head),
    )


def check_scores(source: ModelSource) -> None:
    """Raises UserError where no reward model and no critic can be made of this model's family."""
    config = without_dropout(source.config, 0.0)
    config.num_labels = 1
    _check_head(_empty(source, config, AutoModelForSequenceClassification))


def check_adapters(source: ModelSource, lora: LoraConfig, *, scores: bool) -> None:
    """Raises UserError where a policy of this model's family (or what `scores`) has no module for these adapters."""
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    add_adapters(_empty(source, without_dropout(source.config, 0.0), auto), lora)


def _check_head(model: PreTrainedModel) -> None:
    if not isinstance(getattr(model, "score", None), nn.Linear) or model.base_model is model:
        raise UserError(f"{type(model).__name__} has no linear head named score. {NO_SCORER}")


def _on_meta(source: ModelSource, auto: Any, choice: EngineChoice) -> PreTrainedModel:
    if source.folder is not None and (packed := getattr(source.config, "quantization_config", None)) is not None:
        how = packed.get("quant_method", "") if isinstance(packed, dict) else type(packed).__name__
        raise UserError(
            f"{source.folder} holds quantized weights ({how}), which can't be trained: give the model they "
            "were made of, in 16 or 32 bits"
        )
    config = without_dropout(source.config, choice.dropout)
    heads = own_field(config, "num_attention_heads")
    if isinstance(heads, int):
        distributed.check_heads(heads, choice.settings.sequence_parallel)
    if own_field(config, "attn_logit_softcapping") is not None and source.attention == "sdpa":
        # older versions of transformers leave the cap out and say nothing
        raise UserError(f"{source.name} caps its attention's scores, which sdpa does not: model.attention=eager")
    model = _empty(source, config, auto)
    model.tie_weights()
    if choice.lora is not None and choice.lora.rank:
        add_adapters(model, choice.lora)
    return model


def _empty(source: ModelSource, config: PretrainedConfig, auto: Any) -> PreTrainedModel:
    """The model without values. Raises UserError where transformers can't make it."""
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = auto.from_config(
                config,
                attn_implementation=source.attention,
                dtype=torch.float32,
                trust_remote_code=source.trust_remote_code,
            )
    except Exception as error:  # configurations that don't fit and packages that lack come as errors of all kinds
        if "scaled_dot_product_attention" in str(error):
            raise UserError(f"{source.name} has no sdpa attention in transformers: model.attention=eager") from error
        if auto is AutoModelForSequenceClassification and "Unrecognized configuration class" in str(error):
            what = f"transformers has no sequence classification of {source.config.model_type}"
            raise UserError(f"{source.name} can be no reward model and no critic: {what}. {NO_SCORER}") from error
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")  # lists and advice follow
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"model {source.name} cannot be built as a {auto.__name__}: {kind}{reason}") from error
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
