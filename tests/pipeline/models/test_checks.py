"""Unusual behaviour of model families is detected before training, and supported or refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from engine import Engine, attention
from pipeline.config.stage_sections import LoraConfig
from pipeline.errors import UserError
from pipeline.models.attention import NAME, document_attention
from pipeline.models.build import build_policy, build_scorer
from pipeline.models.checks import verify
from tests.pipeline.models.tiny import (
    LLAMA_LIKE,
    VOCABULARY,
    after_first,
    close,
    config_of,
    frozen,
    ids_of,
    language_model,
    own_logprobs,
    policy_logprobs,
    shaken,
    source_drawn,
    source_in,
    trained,
)

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
ODD: dict[str, dict[str, Any]] = {
    "deepseek_v2": LLAMA_LIKE | EXPERTS | LATENT,
    "glm_moe_dsa": LLAMA_LIKE | EXPERTS | LATENT | {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2},
    "phimoe": LLAMA_LIKE | {"num_local_experts": 4},
    "llama4_text": LLAMA_LIKE
    | {"intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 8, "attention_chunk_size": 6},
    "bert": LLAMA_LIKE,
    "roberta": LLAMA_LIKE | {"is_decoder": True},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64},
    "prophetnet": {
        "hidden_size": 32,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "is_decoder": True,
    },
}
EAGER = {"prophetnet", "xglm"}


def odd(family: str) -> Any:
    return AutoConfig.for_model(
        family, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, pad_token_id=0, **ODD[family]
    )


def policy_of(family: str, folder: Path, dtype: str = "fp32", **rest: Any) -> tuple[Engine, Any]:
    """Return an engine and transformers' model."""
    torch.manual_seed(1)
    model = shaken(AutoModelForCausalLM.from_config(odd(family)))
    model.save_pretrained(folder)
    source = replace(source_in(folder), attention="eager" if family in EAGER else "sdpa")
    return build_policy(source, trained(dtype, **rest)), model


@pytest.mark.parametrize("family", ["llama4_text", "roberta", "glm_moe_dsa", "deepseek_v2"])
def test_policies_of_unusual_families_equal_their_models(family: str, tmp_path: Path) -> None:
    """The families have no separate backbone, compute their own positions, or need a mask."""
    engine, model = policy_of(family, tmp_path)
    actual = verify(engine, max_length=32)
    assert actual == (family == "deepseek_v2")
    ids = ids_of(2, 9)
    close(policy_logprobs(engine, ids), own_logprobs(model, ids))
    close(engine(ids, after_first(ids))[0], own_logprobs(model, ids))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_own_positions_are_detected_even_with_little_effect(dtype: str, tmp_path: Path) -> None:
    """In bf16, wrong positions may change logits less than rounding does."""
    model = AutoModelForCausalLM.from_config(odd("roberta"))
    with torch.no_grad():
        model.get_parameter("roberta.embeddings.position_embeddings.weight").mul_(0.03)
    model.save_pretrained(tmp_path)
    assert not verify(build_policy(source_in(tmp_path), trained(dtype)), max_length=32)


def test_random_expert_selection_is_disabled_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, model = policy_of("phimoe", tmp_path)
    for _ in range(2):
        verify(engine, max_length=32)
    assert capsys.readouterr().err.count("PhimoeForCausalLM (noise, random routing): it trains in evaluation") == 1
    ids = ids_of(2, 30)
    for _ in range(3):
        close(engine(ids, after_first(ids))[0], own_logprobs(model, ids))
        policy_logprobs(engine, ids)  # afterwards the engine is in training mode again
    with_dropout, _ = policy_of("falcon", tmp_path / "falcon", dropout=0.3)
    verify(with_dropout, max_length=32)
    assert with_dropout.module.training


@pytest.mark.parametrize("family", ["bert", "prophetnet"])  # prophetnet depends on the length of a row
def test_a_model_that_attends_to_later_tokens_is_refused(family: str, tmp_path: Path) -> None:
    engine, _ = policy_of(family, tmp_path)
    with pytest.raises(UserError, match=r"(BertLMHeadModel|ProphetNetForCausalLM) attends to later tokens"):
        verify(engine, max_length=32)


def test_positions_reserved_for_padding_are_not_used(tmp_path: Path) -> None:
    engine, _ = policy_of("roberta", tmp_path)
    verify(engine, max_length=63)
    expected = "RobertaForCausalLM supports sequences of 63 tokens, not 64: .*for padding"
    with pytest.raises(UserError, match=expected):
        verify(engine, max_length=64)


def test_lengths_that_change_all_positions_are_refused(tmp_path: Path) -> None:
    sides = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 24}
    changes: dict[str, Any] = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **sides}}
    fields = LLAMA_LIKE | {"vocab_size": VOCABULARY, "original_max_position_embeddings": 24, "pad_token_id": 0}
    language_model(AutoConfig.for_model("phi3", **fields, **changes)).save_pretrained(tmp_path)
    engine = build_policy(source_in(tmp_path), trained())
    assert verify(engine, max_length=24)
    with pytest.raises(UserError, match=r"Phi3ForCausalLM supports sequences of 24 tokens, not 25: .*longrope"):
        verify(engine, max_length=25)


def test_a_model_that_cannot_run_is_refused_with_its_reason(tmp_path: Path) -> None:
    engine, _ = policy_of("xglm", tmp_path, "bf16")
    with pytest.raises(UserError, match=r"XGLMForCausalLM cannot run .* in bf16 .*: change engine\.dtype"):
        verify(engine, max_length=32)


def test_a_model_that_cannot_run_in_4_bits_is_refused_with_the_remedy(tmp_path: Path) -> None:
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 4}
    config = AutoConfig.for_model("mamba2", vocab_size=VOCABULARY, **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    source = replace(source_in(tmp_path), quantize="nf4", attention="eager")
    engine = build_policy(source, trained(lora=LoraConfig(rank=2)))
    with pytest.raises(UserError, match=r"Mamba2ForCausalLM cannot run a row of tokens .* model\.quantize"):
        verify(engine, max_length=32)


def test_models_that_transformers_cannot_build_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any, **__: Any) -> None:
        raise ImportError("\nSomeTower needs a library\nthat you can install")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lacking)
    with pytest.raises(UserError, match=r"model tiny cannot be built .*: ImportError: SomeTower needs a library$"):
        build_policy(source_drawn(config_of("llama")), frozen())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_scale_after_the_head_is_detected_with_small_logits(dtype: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config_of("cohere"))  # the small random weights of a new model
    model.save_pretrained(tmp_path)
    engine = build_policy(source_in(tmp_path), frozen(dtype))
    verify(engine, max_length=32)
    assert engine.module.use_logits


@pytest.mark.parametrize("build", [build_policy, build_scorer, partial(build_scorer, zero_head=True)])
def test_a_missing_sliding_window_is_detected(
    build: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of zeros does not hide the difference."""

    def without_window(*inputs: Any, sliding_window: int | None = None, **rest: Any) -> Any:
        return document_attention(*inputs, **rest)

    keys: dict[str, Any] = {} if build is build_policy else {"pad_id": 0}
    language_model(config_of("mistral", sliding_window=5)).save_pretrained(tmp_path)
    assert verify(build(source_in(tmp_path), frozen(), **keys), max_length=32)
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, without_window)
    again = build(source_in(tmp_path), frozen(), **keys)
    before = attention.attention_name(again.module.backbone)
    assert not verify(again, max_length=32)
    assert attention.attention_name(again.module.backbone) == before


@pytest.mark.parametrize("family", ["deepseek_v2", "phimoe", "falcon"])
def test_adapters_of_a_mixture_are_only_in_linear_layers(family: str, tmp_path: Path) -> None:
    """peft would treat some names as experts, whose weights would then never be filled."""
    engine, model = policy_of(family, tmp_path, lora=LoraConfig(rank=2, alpha=4.0))
    learning = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    assert learning and not any(".experts." in name or ".router." in name for name in learning)
    if family == "deepseek_v2":
        assert any("shared_experts" in name for name in learning)
    verify(engine, max_length=32)
    ids = ids_of(2, 9)
    close(policy_logprobs(engine, ids), own_logprobs(model, ids))


def test_trial_lengths_fit_the_models_positions(tmp_path: Path) -> None:
    language_model(config_of("gpt2", n_positions=40)).save_pretrained(tmp_path)
    assert verify(build_policy(source_in(tmp_path), trained()), max_length=1000)


@pytest.mark.parametrize("scores", [False, True])
def test_a_convolution_over_packed_documents_is_detected_with_small_weights(scores: bool) -> None:
    """The convolution of a new model changes its numbers by less than the tolerance for rounding."""
    config = AutoConfig.for_model(
        "lfm2", vocab_size=VOCABULARY, **LLAMA_LIKE, layer_types=["conv", "full_attention"], conv_L_cache=3
    )
    source = source_drawn(config)
    engine = build_scorer(source, frozen(), pad_id=0) if scores else build_policy(source, frozen())
    assert not verify(engine, max_length=32)
