"""Where models come from, and one clear message for everything that is not one."""

import json
from pathlib import Path

import pytest
import torch

from pipeline.config.schema import ModelConfig
from pipeline.errors import UserError
from pipeline.models.source import check_kind, model_folder, resolve
from tests.pipeline.models.tiny import classifier, config_of, language_model, source_in


def model_config(**keys: object) -> ModelConfig:
    return ModelConfig(name="tiny", **keys)  # type: ignore[arg-type]


def said(config: ModelConfig, folder: Path | None = None) -> str:
    with pytest.raises(UserError) as told:
        resolve(config, 1, folder=folder)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_folder_and_a_stage_with_a_model_in_it(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path / "sft" / "model")
    for path in (tmp_path / "sft", tmp_path / "sft" / "model"):
        source = resolve(model_config(path=str(path)), 3)
        assert source.folder == tmp_path / "sft" / "model" and source.config.model_type == "llama"
        assert source.seed == 3 and source.attention == "sdpa"
    other = resolve(model_config(hub="nobody/nothing"), 1, folder=tmp_path / "sft")
    assert other.folder == tmp_path / "sft" / "model"


def test_random_weights_need_a_shape_only() -> None:
    source = resolve(model_config(weights="random", architecture={"model_type": "opt", "vocab_size": 96}), 5)
    assert source.folder is None and source.config.vocab_size == 96 and source.seed == 5
    assert "model.architecture" in said(model_config(weights="random"))


def test_what_is_no_model(tmp_path: Path) -> None:
    assert "does not exist" in said(model_config(path=str(tmp_path / "no")))
    assert "config.json" in said(model_config(path=str(tmp_path)))
    assert "model.path" in said(model_config())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "no model.safetensors" in said(model_config(path=str(tmp_path)))


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    language_model(config_of("llama")).config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    message = said(model_config(path=str(tmp_path)))
    assert "pytorch_model.bin" in message and "pickle" in message and "save_pretrained" in message


def test_damaged_and_missing_weights_are_named(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path)
    config, file = model_config(path=str(tmp_path)), tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    message = said(config)
    assert str(file) in message and "download it again" in message
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in said(config)
    file.rename(tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (tmp_path / "model-1.safetensors").write_bytes(whole)
    assert "no model-2.safetensors" in said(config)
    index.write_text("{")
    assert f"{index} is damaged" in said(config)


@pytest.mark.parametrize("text", ['{"model_type": "nobody-knows-it"}', "{}", "not JSON"])
def test_a_configuration_that_transformers_does_not_know(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").touch()
    message = said(model_config(path=str(tmp_path)))
    assert str(tmp_path / "config.json") in message and len(message) < 600


def test_kinds(tmp_path: Path) -> None:
    language_model(config_of("gpt2")).save_pretrained(tmp_path / "lm")  # a GPT2LMHeadModel
    classifier(config_of("gpt2")).save_pretrained(tmp_path / "rm")
    check_kind(source_in(tmp_path / "lm"), wanted="ForCausalLM")
    check_kind(source_in(tmp_path / "rm"), wanted="ForSequenceClassification")
    for folder, wanted, stage in (("rm", "ForCausalLM", "sft"), ("lm", "ForSequenceClassification", "reward")):
        with pytest.raises(UserError, match=rf"not a \w+ model \(\.\.\.{wanted}\).*RUN/{stage}$"):
            check_kind(source_in(tmp_path / folder), wanted=wanted)


def test_model_folder_prefers_the_folder_itself(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "model"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").touch()
    assert model_folder(tmp_path) == tmp_path
