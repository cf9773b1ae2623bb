"""Model sources, and one clear message for each invalid source."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig

from pipeline import progress
from pipeline.config.schema import ModelConfig
from pipeline.errors import UserError
from pipeline.models.build import build_policy
from pipeline.models.folder import model_folder
from pipeline.models.source import ModelSource, check_kind, download, resolve
from pipeline.progress import ALONE, UNMEASURED, Progress, Row
from tests.pipeline.models.tiny import (
    classifier,
    close,
    config_of,
    frozen,
    ids_of,
    language_model,
    own_logprobs,
    policy_logprobs,
    source_in,
)


def model_config(**keys: object) -> ModelConfig:
    return ModelConfig(name="tiny", **keys)  # type: ignore[arg-type]


def error_of(config: ModelConfig, folder: Path | None = None) -> str:
    with pytest.raises(UserError) as error:
        resolve(config, 1, folder=folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_folder_and_a_stage_folder(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path / "sft" / "model")
    for path in (tmp_path / "sft", tmp_path / "sft" / "model"):
        source = resolve(model_config(path=str(path)), 3)
        assert source.folder == tmp_path / "sft" / "model" and source.config.model_type == "llama"
        assert source.seed == 3 and source.attention == "sdpa"
    other = resolve(model_config(hub="nobody/nothing"), 1, folder=tmp_path / "sft")
    assert other.folder == tmp_path / "sft" / "model"


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("bloom", "eager"), ("mpt", "eager")])
def test_a_family_without_sdpa_attends_eagerly_unless_the_key_selects_it(family: str, attention: str) -> None:
    keys = {"weights": "random", "architecture": {"model_type": family}}
    assert resolve(model_config(**keys), 1).attention == attention
    assert resolve(model_config(**keys, attention="sdpa"), 1).attention == "sdpa"


def test_scores_with_a_cap_need_eager_attention() -> None:
    capped = {"model_type": "llama", "attn_logit_softcapping": 30.0}
    config = AutoConfig.for_model(**capped)
    assert ModelSource.of(model_config(), config, None, 1).attention == "eager"


def test_random_weights_need_only_an_architecture() -> None:
    source = resolve(model_config(weights="random", architecture={"model_type": "opt", "vocab_size": 96}), 5)
    assert source.folder is None and source.config.vocab_size == 96 and source.seed == 5


def test_sources_without_a_model_are_refused(tmp_path: Path) -> None:
    assert "model.path=" in (error := error_of(model_config(path=str(tmp_path / "no")))) and "no such folder" in error
    assert "config.json" in error_of(model_config(path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "no model.safetensors" in error_of(model_config(path=str(tmp_path)))


def test_the_name_of_a_hub_model_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=r"reward=Me/Model: there is no such folder .*hf download Me/Model --local-dir"):
        model_folder("Me/Model", "reward")
    with pytest.raises(UserError, match=r"actor=runs/x: there is no such folder \(relative paths start at [^)]*\)$"):
        model_folder("runs/x", "actor")


def test_pickles_are_refused_with_a_remedy(tmp_path: Path) -> None:
    language_model(config_of("llama")).config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    message = error_of(model_config(path=str(tmp_path)))
    assert "pytorch_model.bin" in message and "pickle" in message
    assert message.endswith(f"AutoTokenizer)]' {tmp_path} {tmp_path.name}-safetensors")


def test_damaged_and_missing_weights_are_named(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path)
    config, file = model_config(path=str(tmp_path)), tmp_path / "model.safetensors"
    full = file.read_bytes()
    file.write_bytes(full[: len(full) // 2])
    message = error_of(config)
    assert str(file) in message and "download it again" in message
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in error_of(config)
    file.rename(tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (tmp_path / "model-1.safetensors").write_bytes(full)
    assert "no model-2.safetensors" in error_of(config)
    index.write_text("{")
    assert f"{index} is damaged" in error_of(config)


def test_one_file_replaces_the_shards_of_an_earlier_save(tmp_path: Path) -> None:
    """transformers removes the old shards, but not their index."""
    model, config = language_model(config_of("llama")), model_config(path=str(tmp_path))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    source = resolve(config, 1)
    close(policy_logprobs(build_policy(source, frozen()), ids_of(2, 9)), own_logprobs(model, ids_of(2, 9)))


def test_adapters_beside_the_weights_are_refused(tmp_path: Path) -> None:
    """transformers applies such adapters when it loads the folder."""
    language_model(config_of("llama")).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    message = error_of(model_config(path=str(tmp_path)))
    assert "remove adapter_config.json; otherwise merge them" in message and message.endswith(f"{tmp_path.name}-merged")


def test_an_index_names_files_of_its_folder_and_tensors_that_they_have(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "other.safetensors")
    index, config = tmp_path / "m" / "model.safetensors.index.json", model_config(path=str(tmp_path / "m"))
    for name in ("../other.safetensors", str(tmp_path / "other.safetensors")):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert f"names the file {name}, which is not in its folder" in error_of(config)
    (tmp_path / "other.safetensors").rename(tmp_path / "m" / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors", "model.none": "a.safetensors"}}))
    assert "a.safetensors has no tensor model.none, which the index names" in error_of(config)
    for content in ("[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["b"]}}'):
        index.write_text(content)
        assert f"{index} is damaged" in error_of(config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hiden_size", 64, "llama has no field hiden_size: did you mean hidden_size?"),
        ("sliding", True, "llama has no field sliding: remove it, or see the fields of LlamaConfig"),
        ("num_hidden_layers", 10**9, "num_hidden_layers=1000000000: must be a whole number from 1 to 10000"),
        ("vocab_size", 0, "vocab_size=0: must be a whole number"),
        ("hidden_size", "wide", "hidden_size"),
    ],
)
def test_fields_of_an_architecture_are_checked(field: str, value: object, message: str) -> None:
    architecture = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, field: value}
    error = error_of(model_config(weights="random", architecture=architecture))
    assert error.startswith("model.architecture: ") and message in error


def test_fields_that_transformers_converts_are_accepted() -> None:
    fields = {"rope_theta": 1e5, "torch_dtype": "float32", "tie_word_embeddings": True, "num_labels": 1}
    source = resolve(model_config(weights="random", architecture={"model_type": "llama", **fields}), 1)
    assert source.config.rope_parameters["rope_theta"] == 1e5
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "num_hidden_layers": 2, "n_head": 4}  # a field name of another family
    assert resolve(model_config(weights="random", architecture=gpt2), 1).config.n_layer == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "wide"},
        {"hidden_size": None},
        {"architectures": 3},
        {"num_hidden_layers": True},
        {"vocab_size": -1},
        {"initializer_range": "0" * 3000},
    ],
)
def test_wrong_types_in_config_json(tmp_path: Path, fields: dict[str, object]) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    message = error_of(model_config(path=str(tmp_path)))
    assert f"{file} is not supported by transformers" in message and len(message) < 600
    assert next(iter(fields)) in message


@pytest.mark.parametrize("text", ['{"model_type": "nobody-knows-it"}', "{}", "not JSON", "[]", "3"])
def test_an_unknown_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").touch()
    message = error_of(model_config(path=str(tmp_path)))
    assert str(tmp_path / "config.json") in message and len(message) < 600


def test_kinds(tmp_path: Path) -> None:
    language_model(config_of("gpt2")).save_pretrained(tmp_path / "lm")  # saves a GPT2LMHeadModel
    classifier(config_of("gpt2")).save_pretrained(tmp_path / "rm")
    check_kind(source_in(tmp_path / "lm"), wanted="ForCausalLM")
    check_kind(source_in(tmp_path / "rm"), wanted="ForSequenceClassification")
    for folder, expected, stage in (("rm", "ForCausalLM", "sft"), ("lm", "ForSequenceClassification", "reward")):
        with pytest.raises(UserError, match=rf"not a \w+ model \(\.\.\.{expected}\).*RUN/{stage}$"):
            check_kind(source_in(tmp_path / folder), wanted=expected)


def test_model_folder_prefers_the_folder_itself(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "model"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").touch()
    assert model_folder(tmp_path) == tmp_path


def test_a_gated_model_names_the_licence_and_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError

    def refuse(hub: str, **_: object) -> None:
        raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=r"meta/model is gated: .* https://huggingface.co/meta/model, .* HF_TOKEN"):
        resolve(ModelConfig(name="m", hub="meta/model"), seed=1)


class Hub:
    """Stands in for huggingface_hub: a model with pickled weights, and pull requests on top of its commits."""

    def __init__(self, cache: Path, requests: dict[int, tuple[str, str]]) -> None:
        """requests: {number: (author, the commit below the request)}"""
        self.folder, self.requests = cache / "models--a--b", requests
        self.is_reachable = True

    def snapshot_download(self, hub: str, revision: str = "main", **_: object) -> str:
        folder = self.folder / "snapshots" / revision.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").touch()
        if revision != "main":
            (folder / "model.safetensors").touch()
            ref = self.folder / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(folder.name)
        return str(folder)

    def get_repo_discussions(self, hub: str, **_: object) -> list[SimpleNamespace]:
        if not self.is_reachable:
            raise ConnectionError
        return [SimpleNamespace(author=a, git_reference=f"refs/pr/{n}") for n, (a, _) in self.requests.items()]

    def list_repo_commits(self, hub: str, revision: str = "main") -> list[SimpleNamespace]:
        if not self.is_reachable:
            raise ConnectionError
        below = [] if revision == "main" else ["top", self.requests[int(revision.rpartition("/")[2])][1]]
        return [SimpleNamespace(commit_id=commit) for commit in below or ["newest", "older"]]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: self)


def test_the_hubs_conversion_replaces_pickled_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other users, and those below an older commit, are not used. The cache serves without the hub."""
    bot = "SFconvertbot"
    hub = Hub(tmp_path, {3: ("somebody", "newest"), 5: (bot, "older"), 8: (bot, "newest")})
    hub.install(monkeypatch)
    assert download("a/b", weights=False).name == "main"
    assert download("a/b").name == "refs-pr-8"
    hub.is_reachable = False
    assert download("a/b").name == "refs-pr-8"


def test_a_download_may_take_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, hub, limits = Row(), Hub(tmp_path, {8: ("SFconvertbot", "newest")}), list[float]()
    monkeypatch.setattr(progress, "_progress", Progress(row))
    hub.install(monkeypatch)

    def snapshot_download(name: str, **keys: object) -> str:
        limits.append(row.read().limit)
        return hub.snapshot_download(name, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    download("a/b")
    assert limits == [ALONE, ALONE] and row.read().limit == UNMEASURED


def test_a_failed_download_names_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client raises an error about its cache, whatever the cause is."""

    def snapshot_download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("not in the cache") from ConnectionError("certificate verify failed\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=r"a/b cannot .* the hub: ConnectionError: certificate verify failed\. Do"):
        download("a/b")


def test_a_hub_model_without_safetensors_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(tmp_path, {3: ("somebody", "newest")}).install(monkeypatch)
    with pytest.raises(UserError, match=r"a/b has no safetensors .* model\.path=b-safetensors: python -c .* a/b b-saf"):
        download("a/b")


def test_a_configuration_alone_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    language_model(config_of("llama")).config.save_pretrained(tmp_path)
    patterns: list[str] = []

    def snapshot(hub: str, *, allow_patterns: list[str], **_: object) -> str:
        patterns.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for model in (model_config(path=str(tmp_path)), model_config(hub="nobody/model")):
        source = resolve(model, 1, weights=False)
        assert source.folder is None and source.config.model_type == "llama"
    assert "*.json" in patterns and "*.safetensors" not in patterns
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json is not supported by transformers"):
        resolve(model_config(path=str(tmp_path)), 1, weights=False)
