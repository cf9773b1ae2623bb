"""Tiny models of many families in transformers' format, and sources and settings for engines."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from engine import Engine, OptimizerConfig
from engine.loading import persistent_buffers
from engine.parallel import dist, dtensors
from pipeline.config.schema import EngineSettings
from pipeline.models.build import EngineChoice
from pipeline.models.internals import add_classifier
from pipeline.models.source import ModelSource

VOCABULARY = 96
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MIXTURE = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "llama": {**LLAMA_LIKE, "tie_word_embeddings": False},
    "qwen3": {**LLAMA_LIKE, "head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {**LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    "gemma3_text": {**LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8},
    "mistral": LLAMA_LIKE,
    "cohere": {**LLAMA_LIKE, "logit_scale": 0.25},
    "granite": {**LLAMA_LIKE, "logits_scaling": 3.0},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {**LLAMA_LIKE, **MIXTURE, "num_local_experts": 4},
    "glm4_moe": {
        **LLAMA_LIKE,
        **MIXTURE,
        "head_dim": 8,
        "n_routed_experts": 16,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "qwen3_moe": {**LLAMA_LIKE, **MIXTURE, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24},
}

TEXT = LLAMA_LIKE | {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "head_dim": 8}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {"image_size": 28, "patch_size": 14}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT | {"sliding_window": 6}, "vision_config": VISION | PATCHES},
    # transformers has no class of these for `AutoModelForCausalLM`
    "mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": VISION | PATCHES | {"head_dim": 8}},
    "qwen2_5_vl": {
        "text_config": TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
    },
    # the class for `AutoModelForCausalLM` is the text model
    "llama4": {
        "text_config": TEXT | {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 32},
        "vision_config": VISION
        | PATCHES
        | {"intermediate_size": 64, "pixel_shuffle_ratio": 1.0}
        | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64),
    },
    "gemma4": {
        "text_config": TEXT
        | {"global_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY}
        | {"hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": VISION | {"num_key_value_heads": 2, "head_dim": 8},
    },
}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """Return a configuration of the family with special tokens inside the vocabulary."""
    fields = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return AutoConfig.for_model(family, **{**fields, **FAMILIES[family], **changes})


def shaken(model: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    """Add noise to all saved tensors, also to biases and norms, so that a missing tensor changes the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *persistent_buffers(model).values()):
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model.eval()


def language_model(config: PretrainedConfig, seed: int = 1) -> Any:
    """Return a transformers model in fp32 and evaluation mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention_of(config))
    return shaken(model, seed)


def multimodal_model(family: str, seed: int = 1) -> Any:
    """Return a transformers model with a vision encoder, in fp32 and evaluation mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **MULTIMODAL[family])
    return shaken(AutoModelForMultimodalLM.from_config(config, dtype=torch.float32), seed)


def classifier(config: PretrainedConfig, seed: int = 1, labels: int = 1) -> Any:
    """Return a transformers sequence classifier."""
    add_classifier(config)
    torch.manual_seed(seed)
    config.num_labels = labels
    model = AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32, attn_implementation=attention_of(config)
    )
    return shaken(model, seed)


def attention_of(config: PretrainedConfig) -> str:
    """Return the attention implementation that the family supports."""
    return "eager" if config.model_type in ("gemma2", "bloom") else "sdpa"


def source_in(folder: Path, seed: int = 1) -> ModelSource:
    """Return the source of the model in a folder."""
    config = AutoConfig.from_pretrained(folder)
    return ModelSource("tiny", config, folder, seed, attention_of(config), False)


def source_drawn(config: PretrainedConfig, seed: int = 1) -> ModelSource:
    """Return a source of random weights."""
    return ModelSource("tiny", config, None, seed, attention_of(config), False)


def frozen(dtype: str = "fp32", zero_stage: int = 0) -> EngineChoice:
    """Return settings of an engine without training."""
    return EngineChoice(EngineSettings(dtype=dtype, zero_stage=zero_stage))  # type: ignore[arg-type]


def trained(
    dtype: str = "fp32", zero_stage: int = 0, lr: float = 1e-3, compress: str = "none", **rest: Any
) -> EngineChoice:
    """Return settings of an engine with training."""
    optimizer = OptimizerConfig(lr=lr, total_steps=10, schedule="constant", max_grad_norm=0.0)
    settings = EngineSettings(dtype=dtype, zero_stage=zero_stage, compress=compress)  # type: ignore[arg-type]
    return EngineChoice(settings, optimizer, **rest)


def ids_of(rows: int, length: int, seed: int = 1) -> Tensor:
    """Return (rows, length) token ids without special tokens, on the engines' device."""
    token_ids = torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return token_ids.to(dist.world().device)


def after_first(ids: Tensor) -> Tensor:
    """Return the flat indices of all tokens except the first of each row."""
    indices = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    return indices[:, 1:].flatten()


def policy_logprobs(engine: Engine, ids: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens except the first of each row, as an engine scores them."""
    with engine.scoring() as module:
        logprobs: Tensor = module(ids, after_first(ids))[0]
    return logprobs.cpu()


def own_logprobs(model: Any, ids: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens except the first of each row, from the logits of a model."""
    with torch.no_grad():
        logs = torch.log_softmax(model(input_ids=ids.cpu()).logits.float()[:, :-1], -1)
    return logs.gather(-1, ids.cpu()[:, 1:, None]).flatten()


def close(actual: Tensor, expected: Tensor) -> None:
    """Assert that two computations of the same numbers in fp32 differ by rounding only."""
    torch.testing.assert_close(actual, expected, atol=3e-5, rtol=1e-5)


def parameters_of(engine: Engine) -> dict[str, Tensor]:
    """Return the full parameters of an engine by name."""
    return {name: dtensors.full_tensor(p.detach()).cpu() for name, p in engine.module.named_parameters()}


def moved(engine: Engine, updates: int = 1) -> Engine:
    """Change all trained parameters of a policy. Each rank has its own rows."""
    mine = ids_of(2, 9, seed=4)[dist.world().rank :: dist.world().size]
    for _ in range(updates):
        engine.update([mine], lambda module, batch: (-module(batch, after_first(batch))[0].sum(), {}), 16)
    return engine
