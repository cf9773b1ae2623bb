"""Exported folders load with transformers and give the same numbers, from one rank and from two."""

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from pipeline.config.schema import ModelConfig
from pipeline.config.stage_sections import LoraConfig
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError
from pipeline.models import export
from pipeline.models.build import build_policy, build_scorer
from pipeline.models.checks import verify
from pipeline.models.export import export_policy, export_scorer
from pipeline.models.source import resolve
from tests.pipeline.models.tiny import (
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
    source_drawn,
    source_in,
    trained,
)
from tests.ranks import run_ranks

MODELS = ["llama", "opt", "gpt2", "qwen3", "mixtral", "qwen3_moe", "glm4_moe"]
ON_RANKS = ["opt", "qwen3", "mixtral", "glm4_moe"]
LORA = LoraConfig(rank=2, alpha=4.0)


def tokenizer() -> ChatTokenizer:
    return train_tokenizer(["a few words to count", "and some more words"], 270)


def stored_names(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


def loaded_logprobs(folder: Path, ids: Tensor) -> Tensor:
    return own_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ids)


def adapted_logprobs(base: Path, adapter: Path, ids: Tensor) -> Tensor:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    return own_logprobs(model, ids)


@pytest.mark.parametrize("family", MODELS)
def test_a_trained_language_model_loads_with_equal_numbers(family: str, tmp_path: Path) -> None:
    language_model(config_of(family)).save_pretrained(tmp_path / "base")
    source = source_in(tmp_path / "base")
    engine = moved(build_policy(source, trained(lr=0.02)))
    export_policy(engine, source, tokenizer(), tmp_path / "out")
    assert stored_names(tmp_path / "out") == stored_names(tmp_path / "base")
    ids = ids_of(2, 9)
    ours = policy_logprobs(engine, ids)
    close(loaded_logprobs(tmp_path / "out", ids), ours)
    assert (ours - loaded_logprobs(tmp_path / "base", ids)).abs().max() > 0.01
    again = build_policy(source_in(tmp_path / "out"), frozen())  # zerochat loads the export, too
    close(policy_logprobs(again, ids), ours)


FAULTY_LLAMA4 = pytest.mark.skipif(
    transformers.__version__ == "5.24.0", reason="its forward reads a field that its outputs do not have"
)


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "qwen2_5_vl", pytest.param("llama4", marks=FAULTY_LLAMA4)])
def test_a_multimodal_model_keeps_its_encoders(family: str, tmp_path: Path) -> None:
    base = multimodal_model(family)
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").write_text("{}")
    source = resolve(ModelConfig(name="tiny", path=str(tmp_path / "base")), 1)
    engine = build_policy(source, trained(zero_stage=3, lr=0.02), generates=True)
    verify(engine, max_length=16)
    ids = ids_of(2, 9)
    close(policy_logprobs(engine, ids), own_logprobs(base, ids))
    with engine.generating():  # the flip includes the parity check
        pass
    export_policy(moved(engine), source, tokenizer(), tmp_path / "out")
    out, report = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    before, after = base.state_dict(), out.state_dict()
    assert stored_names(tmp_path / "out") == stored_names(tmp_path / "base")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "language_model" in name or name == "lm_head.weight"}
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == "{}"


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mixtral"])
def test_a_reward_model_loads_with_head_and_reference_level(family: str, tmp_path: Path) -> None:
    classifier(config_of(family)).save_pretrained(tmp_path / "base")
    source = source_in(tmp_path / "base")
    engine = build_scorer(source, frozen(), pad_id=0)
    export_scorer(engine, source, tokenizer(), tmp_path / "out", extra={"reward_mean": 0.25, "reward_std": 1.5})
    assert stored_names(tmp_path / "out") == stored_names(tmp_path / "base")
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    ids = ids_of(3, 8)
    with torch.no_grad():
        logits = model(input_ids=ids.cpu(), attention_mask=torch.ones_like(ids).cpu()).logits
    assert logits.shape == (3, 1) and model.config.reward_mean == 0.25 and model.config.reward_std == 1.5
    close(engine(ids)[:, -1].cpu(), logits[:, 0])
    assert source_in(tmp_path / "out").config.reward_mean == 0.25


@pytest.mark.parametrize("family", ["gpt2", "llama", "glm4_moe"])
def test_adapters_are_merged_and_peft_is_not_needed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `lora`, the adapters are exported, too, and peft loads them on the base model."""
    language_model(config_of(family)).save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    source = source_in(Path("base"))
    engine = moved(build_policy(source, trained(lr=0.1, lora=LORA)))
    export_policy(engine, source, tokenizer(), tmp_path / "out", lora=LORA)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")  # a relative folder looks like a hub name
    assert set(load_file(tmp_path / "out" / "model.safetensors")) <= set(load_file(tmp_path / "base/model.safetensors"))
    ids = ids_of(2, 9)
    ours = policy_logprobs(engine, ids)
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "peft", None)  # as if it were not installed
        close(loaded_logprobs(tmp_path / "out", ids), ours)
    assert (ours - loaded_logprobs(tmp_path / "base", ids)).abs().max() > 0.01
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert not any("adapter" in name for name in names)
    close(adapted_logprobs(tmp_path / "base", tmp_path / "adapter", ids), ours)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    modules = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in factors}
    assert modules <= {name for name, _ in AutoModelForCausalLM.from_pretrained(tmp_path / "base").named_modules()}
    # The names that other tools expect.
    assert {key.rpartition(".lora_")[2] for key in factors} == {"A.weight", "B.weight"}


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_files_besides_the_weights(family: str, tmp_path: Path) -> None:
    config = config_of(family, attention_dropout=0.3, auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    source, made = source_drawn(config), tokenizer()
    export_policy(build_policy(source, trained()), source, made, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"out"}  # no temporary folder remains
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == list(made.end_ids) and generation.pad_token_id == made.pad_id
    assert generation.do_sample and generation.temperature in (None, 1.0)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["attention_dropout"] == 0.3 and saved["dtype"] == "float32"
    assert saved["architectures"] == [type(AutoModelForCausalLM.from_config(config)).__name__]
    assert "auto_map" not in saved  # with trust_remote_code=True, transformers would miss the file
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("a few words")["input_ids"] == made.hf("a few words")["input_ids"]
    assert theirs.chat_template == made.hf.chat_template


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_sixteen_bit_engines_export_sixteen_bits(dtype: str, stored: torch.dtype, tmp_path: Path) -> None:
    source = source_drawn(config_of("llama"))
    engine = build_policy(source, trained(dtype))
    export_policy(engine, source, tokenizer(), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {stored}
    masters = parameters_of(engine)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, masters[f"lm.{name}"].to(stored))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == stored


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 16000)
    language_model(config_of("llama")).save_pretrained(tmp_path / "base")
    source = source_in(tmp_path / "base")
    export_policy(build_policy(source, frozen()), source, tokenizer(), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2 and {p.name for p in files} == set(index["weight_map"].values())
    assert all(p.stat().st_size < 20000 for p in files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for p in files for t in load_file(p).values())
    assert not list((tmp_path / "out").glob("part-*"))
    ids = ids_of(2, 9)
    close(loaded_logprobs(tmp_path / "out", ids), loaded_logprobs(tmp_path / "base", ids))
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1, (
        "all files must have the same permissions"
    )


def test_an_export_replaces_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale").touch()
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "half").touch()
    source = source_drawn(config_of("llama"))
    export_policy(build_policy(source, frozen()), source, tokenizer(), tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names and not names & {"stale", "half"}


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (SafetensorError("Error while serializing: I/O error: No space left (os error 28)"), "the disk is full"),
        (OSError(errno.EPERM, "Operation not permitted"), "writing failed"),
        (OSError(errno.EROFS, "Read-only file system"), "writing failed"),
    ],
)
def test_an_export_that_cannot_write_changes_nothing(
    error: Exception, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(export, "save_file", fail)
    source = source_drawn(config_of("llama"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "earlier").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"{what}.*run the same command again"):
        export_policy(build_policy(source, frozen()), source, tokenizer(), tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before  # an incomplete model would still fill the disk


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """Under ZeRO-3, load every model, score, train, export, and initialize random weights."""
    torch.set_num_threads(1)
    ids, actual, made = ids_of(2, 9), {}, tokenizer()
    for family in ON_RANKS:
        source = source_in(folder / family)
        engine = build_policy(source, trained(zero_stage=3, lr=0.02))
        actual[family] = policy_logprobs(engine, ids)
        export_policy(moved(engine), source, made, folder / f"{family}-out")
    actual["on the host"] = [name for name, _ in export._full_tensors(engine, "lm.", engine.module.lm)]
    source = source_in(folder / "llama")
    engine = moved(build_policy(source, trained(zero_stage=3, lr=0.1, lora=LORA)))
    actual["lora"] = policy_logprobs(engine, ids)
    export_policy(engine, source, made, folder / "lora-out", lora=LORA)
    scorer = build_scorer(source, frozen(zero_stage=3), pad_id=0)
    actual["values"] = scorer(ids)
    export_scorer(scorer, source, made, folder / "scorer-out", extra={})
    for seed in (1, 2):
        drawn = build_policy(source_drawn(config_of("opt"), seed), trained(zero_stage=3))
        actual[f"drawn-{seed}"] = parameters_of(drawn)
    return actual


def test_two_ranks_load_train_and_export_like_one_rank(tmp_path: Path) -> None:
    for family in ("llama", *ON_RANKS):
        language_model(config_of(family)).save_pretrained(tmp_path / family, max_shard_size="30KB")
    first, second = run_ranks(on_two_ranks, 2, tmp_path)
    assert first["on the host"] and not second["on the host"]
    ids = ids_of(2, 9)
    for family in ON_RANKS:
        assert torch.equal(first[family], second[family])
        close(first[family], loaded_logprobs(tmp_path / family, ids))
        engine = moved(build_policy(source_in(tmp_path / family), trained(lr=0.02)))
        close(loaded_logprobs(tmp_path / f"{family}-out", ids), policy_logprobs(engine, ids))
    close(first["lora"], loaded_logprobs(tmp_path / "lora-out", ids))
    close(first["lora"], adapted_logprobs(tmp_path / "llama", tmp_path / "adapter", ids))
    close(first["values"], build_scorer(source_in(tmp_path / "llama"), frozen(), pad_id=0)(ids).cpu())
    close(first["values"], build_scorer(source_in(tmp_path / "scorer-out"), frozen(), pad_id=0)(ids).cpu())
    for seed in (1, 2):
        for name, parameter in parameters_of(build_policy(source_drawn(config_of("opt"), seed), frozen())).items():
            for result in (first, second):
                assert torch.equal(result[f"drawn-{seed}"][name], parameter), name
    embedding = "lm.model.decoder.embed_tokens.weight"
    assert not torch.equal(first["drawn-1"][embedding], first["drawn-2"][embedding])


def test_a_model_with_code_of_its_own_is_exported_with_the_code(tmp_path: Path) -> None:
    """The next stage builds the exported model, and so does transformers."""
    base, ids = tmp_path / "base", ids_of(2, 9)
    language_model(config_of("llama")).save_pretrained(base)
    (base / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (base / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    fields = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | fields))
    model = ModelConfig(name="own", trust_remote_code=True)
    source = resolve(model, 1, folder=base)
    engine = build_policy(source, frozen())
    export_policy(engine, source, tokenizer(), tmp_path / "out")
    again = build_policy(resolve(model, 1, folder=tmp_path / "out"), frozen())
    close(policy_logprobs(again, ids), policy_logprobs(engine, ids))
