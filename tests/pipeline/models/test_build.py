"""Engines from model sources: every layout of files, random weights, adapters, dropout, and refusals."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    LlavaConfig,
    PretrainedConfig,
    TrOCRConfig,
)

from pipeline.config.schema import ModelConfig
from pipeline.config.stage_sections import LoraConfig
from pipeline.errors import UserError
from pipeline.models import build
from pipeline.models.build import (
    build_policy,
    build_scorer,
    check_adapters,
    check_scores,
    fuse_kernels,
    natural_precision,
    without_dropout,
)
from pipeline.models.checks import verify
from pipeline.models.internals import adapters_off
from pipeline.models.source import ModelSource, resolve
from tests.pipeline.models.tiny import (
    FAMILIES,
    LLAMA_LIKE,
    MULTIMODAL,
    VOCABULARY,
    after_first,
    classifier,
    close,
    config_of,
    frozen,
    ids_of,
    language_model,
    moved,
    multimodal_model,
    own_logprobs,
    parameters_of,
    policy_logprobs,
    shaken,
    source_drawn,
    source_in,
    trained,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize("family", ["opt", "gpt2", "qwen3"])
def test_a_tied_model_needs_no_head_in_its_files(family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = shaken(AutoModel.from_config(config_of(family)))
    base.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith(("model.", "transformer.")) for name in names)
    ids = ids_of(2, 9)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    actual = policy_logprobs(build_policy(source_in(tmp_path), frozen()), ids)
    close(actual, own_logprobs(model, ids))


def test_a_reward_model_from_a_language_model_has_a_new_narrow_head(tmp_path: Path) -> None:
    model = language_model(config_of("llama", hidden_size=2048, head_dim=8))
    model.save_pretrained(tmp_path)
    found = [parameters_of(build_scorer(source_in(tmp_path, seed), frozen(), pad_id=0)) for seed in (1, 2, 1)]
    head, other, again = (parameters.pop("model.score.weight") for parameters in found)
    own = dict(model.named_parameters())
    assert len(found[0]) == len(own) - 1  # all parameters except lm_head
    for name, value in found[0].items():
        assert torch.equal(value, own[name.removeprefix("model.")]), name
    assert head.std().item() == pytest.approx(1 / math.sqrt(2049), rel=0.05) and abs(head.mean().item()) < 0.002
    assert torch.equal(again, head) and not torch.equal(head, other)


@pytest.mark.parametrize("family", ["cohere", "granite", "glm4_moe", "mixtral"])
def test_mixtures_and_families_without_a_classifier_in_transformers_score(family: str, tmp_path: Path) -> None:
    model = language_model(config_of(family))
    model.save_pretrained(tmp_path)
    engine, ids = build_scorer(source_in(tmp_path), frozen(), pad_id=0), ids_of(2, 9)
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False).last_hidden_state
    values = engine.score([ids], lambda module, batch: module(batch))[0]
    close(values, hidden @ parameters_of(engine)["model.score.weight"][0])


@pytest.mark.parametrize("family", list(FAMILIES))
def test_random_weights_have_the_familys_distribution(family: str) -> None:
    config = config_of(family)
    torch.manual_seed(0)
    own = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    for name, value in parameters_of(build_policy(source_drawn(config), frozen())).items():
        theirs = own[name[3:]]
        if value.ndim < 2:  # norms and biases are not random
            assert torch.equal(value, theirs), name
        elif not (
            family == "gpt2" and name.endswith("c_proj.weight")
        ):  # GPT-2 scales these by depth, zerochat does not
            assert abs(value.mean().item() - theirs.mean().item()) < 0.005, name
            assert value.std().item() == pytest.approx(theirs.std().item(), rel=0.15), name


def random_mamba(zero_stage: int) -> dict[str, Tensor]:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1, state_size=4, vocab_size=96)
    source = ModelSource("tiny", config, None, 1, "eager", False)
    return parameters_of(build_policy(source, frozen(zero_stage=zero_stage)))


def test_random_weights_of_a_mixer_that_writes_into_other_layers() -> None:
    expected = random_mamba(0)
    for actual in run_ranks(random_mamba, 2, 3):
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    """Their names and shapes fit, so they would be read without their scales."""
    model = language_model(config_of("llama"))
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model.config.save_pretrained(tmp_path)
    save_file({n: t.to(torch.float8_e4m3fn) for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"quantized weights \(fp8\).*16 or 32 bits"):
        build_policy(source_in(tmp_path), frozen())
    with pytest.raises(UserError, match="quantized weights"):  # the doctor builds the reward model without weights
        check_scores(source_in(tmp_path))


def saved(folder: Path, change: Callable[[dict[str, Tensor]], object], model: torch.nn.Module | None = None) -> Path:
    """Save a model of two layers and change its tensors."""
    (language_model(config_of("llama")) if model is None else model).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
            tensors[name].view(-1)[-1] = value

    names = r"in 2 of \d+ tensors \(model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight\)"
    folder = saved(tmp_path, damage)
    for choice in (frozen(), trained()):
        with pytest.raises(UserError, match=names):
            build_policy(source_in(folder), choice)


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, lambda t: t.update({name: value.mul(100).to(torch.int8) for name, value in t.items()}))
    with pytest.raises(UserError, match=r"has values of torch\.int8, as quantized weights have"):
        build_policy(source_in(folder), frozen())


MISSING = r"1 parameters are missing from the files, for example "


@pytest.mark.parametrize(
    ("family", "lost", "message"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", rf"{MISSING}model\.layers\.1\.mlp\.up_proj\.weight"),
        ("llama", "lm_head.weight", rf"{MISSING}lm_head\.weight"),
        ("classifier", "score.weight", rf"{MISSING}score\.weight"),
    ],
)
def test_missing_weights(family: str, lost: str, message: str, tmp_path: Path) -> None:
    model = classifier(config_of("llama")) if family == "classifier" else language_model(config_of(family))
    folder = saved(tmp_path, lambda tensors: tensors.pop(lost), model)
    with pytest.raises(UserError, match=message):
        if family == "classifier":
            build_scorer(source_in(folder), frozen(), pad_id=0)
        else:
            build_policy(source_in(folder), frozen())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"intermediate_size": 40}, r"\(40, 32\).*config\.json"),
        ("mixtral", {"intermediate_size": 40}, r"\(4, 80, 32\).*config\.json"),
        (
            "llama",
            {"num_hidden_layers": 1},
            r"the files have model\.layers\.1.*, but config\.json defines fewer layers",
        ),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}, "shape"),
    ],
)
def test_a_configuration_of_other_weights(family: str, changes: dict[str, int], message: str, tmp_path: Path) -> None:
    language_model(config_of(family)).save_pretrained(tmp_path)
    config_of(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        build_policy(source_in(tmp_path), frozen())
    assert len(str(error.value)) < 800


def test_unused_tensors_are_named_unless_they_are_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        # A buffer that old versions of transformers saved.
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    build_policy(source_in(saved(tmp_path / "a", add)), frozen())
    build_scorer(source_in(tmp_path / "a"), frozen(), pad_id=0)  # the language model's head is unused
    tied = language_model(config_of("qwen3"))
    build_policy(
        source_in(
            saved(tmp_path / "b", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}), tied)
        ),
        frozen(),
    )
    assert "does not use" not in capsys.readouterr().err
    build_policy(source_in(saved(tmp_path / "c", lambda t: t.update({"model.nrom.weight": torch.ones(32)}))), frozen())
    output = capsys.readouterr().err
    assert "does not use 1 tensors of the files, such as model.nrom.weight" in output


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_different_values_of_tied_weights_are_refused(family: str, tmp_path: Path) -> None:
    """transformers uses both values. With the correction, zerochat does so, too."""
    head = torch.linspace(-1.0, 1.0, VOCABULARY * 32).view(VOCABULARY, 32)
    folder = saved(tmp_path / "a", lambda t: t.update({"lm_head.weight": head}), language_model(config_of(family)))
    expected = own_logprobs(AutoModelForCausalLM.from_pretrained(folder), ids_of(2, 9))
    with pytest.raises(
        UserError, match=r"ties lm_head\.weight and .* different values .* tie_word_embeddings to false"
    ):
        build_policy(source_in(folder), frozen())
    source = source_in(folder)
    source.config.tie_word_embeddings = False
    close(policy_logprobs(build_policy(source, frozen()), ids_of(2, 9)), expected)
    nan = torch.full_like(head, math.nan)
    damaged = {
        "lm_head.weight": nan,
        f"{'transformer.wte' if family == 'gpt2' else 'model.embed_tokens'}.weight": nan + 0,
    }
    with pytest.raises(UserError, match="NaN or infinite values in 1 of"):
        build_policy(
            source_in(saved(tmp_path / "b", lambda t: t.update(damaged), language_model(config_of(family)))), frozen()
        )


class OwnConfig(LlamaConfig):
    """The configuration of a family that transformers does not have."""

    model_type = "own"


SMALL_BERT = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=96)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (OwnConfig(), "no sequence classification of own"),
        (TrOCRConfig(), "no sequence classification of trocr"),  # transformers has no base model of it
        (AutoConfig.for_model("llama4", **MULTIMODAL["llama4"]), "no sequence classification of llama4"),
        (SMALL_BERT, "no linear head named score"),
    ],
)
def test_families_that_cannot_score(config: PretrainedConfig, what: str) -> None:
    with pytest.raises(UserError, match=what) as error:
        build_scorer(source_drawn(config), frozen(), pad_id=0)
    assert len(str(error.value)) < 420


@pytest.mark.parametrize("family", ["mistral3", "qwen2_5_vl"])
def test_a_scorer_has_the_weights_of_a_multimodal_checkpoint(family: str, tmp_path: Path) -> None:
    model = multimodal_model(family)
    model.save_pretrained(tmp_path)  # the names in the files are not those of the parameters
    source = resolve(ModelConfig(name="tiny", path=str(tmp_path)), 1)
    engine = build_scorer(source, frozen(), pad_id=5)
    assert source.config.get_text_config().pad_token_id == 5  # the one that transformers reads
    parameters = {name.removeprefix("model."): value for name, value in engine.full_parameters()}
    del parameters["score.weight"]
    assert set(parameters) == {name for name, _ in model.named_parameters()} - {"lm_head.weight"}
    for name, value in parameters.items():
        assert torch.equal(value.cpu(), model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("bloom"), "has no sdpa attention in transformers"),
        (config_of("gemma2", attn_logit_softcapping=30.0), "caps attention scores"),
    ],
)
def test_a_family_that_sdpa_does_not_support_names_the_key(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UserError, match=rf"{reason}.*model\.attention=eager"):
        build_policy(replace(source_drawn(config), attention="sdpa"), frozen())


def test_the_requested_dropout_is_used_and_the_configuration_unchanged() -> None:
    config = config_of("opt", dropout=0.1, attention_dropout=0.2, layerdrop=0.3)
    clone = without_dropout(config, 0.05)
    assert (clone.dropout, clone.attention_dropout, clone.layerdrop) == (0.05, 0.05, 0.0)
    assert (config.dropout, config.attention_dropout, config.layerdrop) == (0.1, 0.2, 0.3)
    multimodal = LlavaConfig(text_config=config_of("opt", dropout=0.1, layerdrop=0.3))
    text = without_dropout(multimodal, 0.05).get_text_config()
    assert (text.dropout, text.layerdrop, multimodal.text_config.dropout) == (0.05, 0.0, 0.1)
    pre = without_dropout(config_of("gpt2"), 0.0)
    assert (pre.attn_pdrop, pre.embd_pdrop, pre.resid_pdrop) == (0.0, 0.0, 0.0)
    ids = ids_of(2, 9)
    for rate, equal in ((0.0, True), (0.3, False)):
        engine = build_policy(source_drawn(config_of("opt", dropout=0.1)), trained(dropout=rate))
        assert engine.module.training
        first, second = (engine(ids, after_first(ids))[0] for _ in range(2))
        assert torch.equal(first, second) == equal
        with engine.scoring() as module:
            assert torch.equal(module(ids, after_first(ids))[0], module(ids, after_first(ids))[0])


def lora(**keys: object) -> LoraConfig:
    return LoraConfig(rank=2, alpha=4.0, **keys)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error:fan_in_fan_out")
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_adapters_start_at_zero_and_only_they_are_trained(family: str, tmp_path: Path) -> None:
    model = language_model(config_of(family))
    model.save_pretrained(tmp_path)
    engine = build_policy(source_in(tmp_path), trained(lr=0.05, lora=lora()))
    learning = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert learning and all(".lora_A." in name or ".lora_B." in name for name in learning)
    assert not any("lm_head" in name or "embed" in name or "wte" in name for name in learning)
    linear = sum(type(m).__name__ in ("Linear", "Conv1D") for n, m in model.named_modules() if n != "lm_head")
    assert len(learning) == 2 * linear  # every linear layer of the blocks
    ids = ids_of(2, 9)
    base = own_logprobs(model, ids)
    close(policy_logprobs(engine, ids), base)
    assert (policy_logprobs(moved(engine), ids) - base).abs().max() > 1e-3
    with adapters_off(engine.module):
        close(policy_logprobs(engine, ids), base)
    assert (policy_logprobs(engine, ids) - base).abs().max() > 1e-3


def test_adapters_of_a_scorer_train_its_head_too(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path)
    engine = build_scorer(source_in(tmp_path), trained(lora=lora(targets="q_proj")), pad_id=0)  # one name
    learning = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert "model.score.weight" in learning and len(learning) == 1 + 2 * 2
    assert all("q_proj.lora_" in name for name in learning if name != "model.score.weight")


def test_adapters_of_the_head_are_trained(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path)
    engine = build_policy(source_in(tmp_path), trained(lr=0.05, lora=lora(targets=["lm_head"])))
    verify(engine, max_length=16)
    ids = ids_of(2, 9)
    before = policy_logprobs(engine, ids)
    assert (policy_logprobs(moved(engine), ids) - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["no_proj"], r"lora\.targets=\['no_proj'\] matches no module; .*q_proj"),
        (["embed_tokens", "q_proj"], r"matches model\.embed_tokens, which cannot have adapters: .*q_proj"),
        (["q_proj", "score"], r"matches score, which cannot have adapters: it is the value head"),
    ],
)
def test_adapters_of_other_targets_are_refused(targets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_scorer(source_drawn(config_of("llama")), trained(lora=lora(targets=targets)), pad_id=0)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_adapters_of_a_head_that_is_the_embedding_are_refused(family: str) -> None:
    """A merged model has one tensor for both, so its export would lose the update of the head."""
    with pytest.raises(
        UserError, match=r"matches lm_head, which cannot have adapters: it .* shares its weight with the embedding"
    ):
        check_adapters(source_drawn(config_of(family)), lora(targets=["lm_head"]), scores=False)


def test_the_padding_id_reaches_the_scorers_configuration(tmp_path: Path) -> None:
    classifier(config_of("llama")).save_pretrained(tmp_path)
    source = source_in(tmp_path)
    build_scorer(source, frozen(), pad_id=None)
    assert source.config.pad_token_id is None and source.config.num_labels == 1
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config.pad_token_id == 0


@pytest.mark.parametrize(("card", "expected"), [(None, "fp32"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((12, 0), "bf16")])
def test_dtype_auto_depends_on_the_machine(
    card: tuple[int, int] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
    assert natural_precision() == expected


def fuse_a_model_and_copy_it() -> None:
    model = AutoModelForCausalLM.from_config(config_of("qwen3"))
    names = [name for name, _ in model.named_parameters()]
    fuse_kernels(model)
    assert [name for name, _ in model.named_parameters()] == names
    clone = copy.deepcopy(model)  # generation makes a copy
    for each in (model, clone):
        layer = each.model.layers[0]
        for module in (layer.mlp, layer.input_layernorm, layer.self_attn.q_norm, each.model.norm):
            assert module.forward.__self__ is module and "liger" in module.forward.__module__
        # The fused loss is not used.
        assert type(each).forward is type(model).forward and "liger" not in each.forward.__module__


def fuse_an_unsupported_family() -> None:
    model = AutoModelForCausalLM.from_config(config_of("opt"))
    fuse_kernels(model)
    assert not any("liger" in module.forward.__module__ for module in model.modules())


def fuse_a_family_without_a_fused_rotary_embedding() -> None:
    config = AutoConfig.for_model("glm4", **LLAMA_LIKE, head_dim=8, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    fuse_kernels(model)
    assert "liger" in model.model.norm.forward.__module__


def fuse_a_reward_model() -> None:
    """Liger Kernel refuses a classifier of Gemma 3, and takes its decoder."""
    model = classifier(config_of("gemma3_text"))
    fuse_kernels(model)
    assert "liger" in model.model.norm.forward.__module__


def fuse_no_experts() -> None:
    """Liger Kernel's experts read a number of the device on the host."""
    model = AutoModelForCausalLM.from_config(config_of("mixtral"))
    fuse_kernels(model)
    assert "liger" in model.model.norm.forward.__module__
    assert "liger" not in model.model.layers[0].mlp.experts.forward.__module__


def fuse_a_family_that_liger_cannot_import() -> None:
    """In transformers 5.23, Liger Kernel 0.8.5 does not find the output class of Qwen 2.5 VL."""
    model = multimodal_model("qwen2_5_vl")
    with patch.dict("sys.modules", {"liger_kernel.transformers.model.qwen2_5_vl": None}):
        fuse_kernels(model)
    assert "liger" not in model.model.language_model.norm.forward.__module__


def fuse_only_gates_that_liger_computes() -> None:
    """Liger Kernel's gates have SiLU and no bias, whatever the configuration has."""
    for changes in ({"hidden_act": "relu"}, {"mlp_bias": True}):
        models = [AutoModelForCausalLM.from_config(config_of("llama", **changes))]
        fuse_kernels(models[0])
        models.append(AutoModelForCausalLM.from_config(models[0].config))
        assert "liger" in models[0].model.norm.forward.__module__
        assert all("liger" not in model.model.layers[0].mlp.forward.__module__ for model in models)


def fuse_all() -> None:
    """Run the checks, each with a family of its own."""
    fuse_a_model_and_copy_it()
    fuse_an_unsupported_family()
    fuse_a_family_without_a_fused_rotary_embedding()
    fuse_a_reward_model()
    fuse_no_experts()
    fuse_a_family_that_liger_cannot_import()
    fuse_only_gates_that_liger_computes()


def test_fused_kernels_replace_norms_and_gates_of_supported_families() -> None:
    run_ranks(fuse_all, 1)  # in a new process, because Liger Kernel also replaces functions of transformers


@pytest.mark.parametrize("compiles", [True, False])
def test_fused_kernels_are_the_default_where_triton_compiles(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(build.kernels, "has_triton", lambda: compiles)
    assert [build._should_fuse(choice) for choice in ("auto", "liger", "none")] == [compiles, True, False]


def test_fused_kernels_that_this_machine_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = replace(source_drawn(config_of("llama")), fused_kernels="liger")
    with pytest.raises(UserError, match=r"needs a GPU, which this machine does not have: set model.fused_kernels=auto"):
        build_policy(source, frozen())
