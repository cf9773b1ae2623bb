"""`zerochat export`: folders with a model card, adapters, uploads to a hub on loopback, and GGUF files."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard, RepoUrl, constants
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import Sampling
from pipeline.chat.folder import ChatModel
from pipeline.chat.participant import load
from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import LoraConfig
from pipeline.data.records import Message
from pipeline.data.tokenizer import load_tokenizer
from pipeline.export.command import main
from pipeline.models.build import build_policy
from pipeline.models.export import export_policy
from tests.pipeline.models.tiny import after_first, ids_of, source_in, trained
from tests.test_chat import save_model, write_manifest

LORA = LoraConfig(rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose SFT stage trained adapters of a local model, and whose DPO stage trained all parameters."""
    root = tmp_path_factory.mktemp("export")
    base = root / "base"
    save_model(base, 0)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    run = root / "runs" / "x"
    save_model(run / "dpo" / "model", 1)
    source, tokenizer = source_in(base), load_tokenizer(str(base))
    engine = build_policy(source, trained(lr=0.1, lora=LORA))
    ids = ids_of(2, 9)
    engine.update([ids], lambda module, batch: (-module(batch, after_first(batch))[0].sum(), {}), 16)
    export_policy(engine, source, tokenizer, run / "sft" / "model", lora=LORA)
    config = RunConfig.model_validate({
        "model": {"name": "m", "path": str(base)}, "seed": 7,
        "data": {"name": "d", "sources": [{"path": "/data/mine.jsonl"}]},
        "sft": {"lora": LORA.model_dump(), "lr": 3e-4},
    })  # fmt: skip
    for stage in ("sft", "dpo"):
        (run / stage / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        figures = {"gold_score": 0.25, "final": {"eval_loss": 1.5}}
        (run / stage / "summary.json").write_text(json.dumps(figures))
    write_manifest(run, sft="finished", dpo="finished")
    return run


def greedy(folder: Path, text: str) -> list[int]:
    """Return transformers' greedy tokens for a question, without code of this project."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return continued(model, tokenizer, text)


def continued(model: Any, tokenizer: Any, text: str) -> list[int]:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return [int(token) for token in output]


def test_a_folder_has_a_card_and_the_same_greedy_tokens(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([str(run), "--to", "folder", "--output", str(out)]) == 0  # the newest stage
    ours = load(ChatModel("dpo", run / "dpo" / "model"))
    prompt = ours.tokenizer.encode_prompt([Message("user", "hello there")])
    sampling = Sampling(24, 0, end_ids=ours.tokenizer.end_ids)
    assert greedy(out, "hello there") == ours.rollouts.generate([prompt], sampling, [0])[0].token_ids
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "transformers")
    assert card.data.tags == ["zerochat", "sft", "dpo"]
    for line in (
        "| preference loss on held-out pairs | 1.5 |",
        "| judge's score of answers to held-out prompts at temperature 1 | 0.25 |",
        "| SFT | mine.jsonl |  | unknown |", "| SFT | 7 | 0.0003 | 64 conversations | adapters (LoRA) of rank 2 |",
        "- Base model: apache-2.0",
    ):  # fmt: skip
        assert line in card.text, card.text
    assert main([str(run), "--to", "folder", "--output", str(out)]) == 2  # a folder with files is refused
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_an_output_below_a_file_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "new"
    assert main([str(run), "--to", "folder", "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {output} cannot be written (") and f"'{output.parent}'" in error


def test_an_export_to_a_full_disk_is_one_message(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(source: object, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(source))

    monkeypatch.setattr(shutil, "copyfile", full)
    assert main([str(run), "--to", "folder", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'out'} cannot be written ([Errno 28] No space left on device: ")
    assert error.count("No space") == 1 and not list(tmp_path.iterdir())


def test_adapters_load_on_top_of_their_base(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "adapter"
    assert main([str(run / "sft"), "--to", "adapter", "--output", str(out), "--license", "mit"]) == 0
    base = str(run.parents[1] / "base")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.library_name) == ("mit", "peft") and base in card.text
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert continued(model, tokenizer, "hello there") == greedy(run / "sft" / "model", "hello there")
    assert main([str(run / "dpo"), "--to", "adapter"]) == 2
    assert "has no adapters, because it trained all parameters" in capsys.readouterr().err


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bytes]]:
    """The files of each repository. The names of the private ones are the keys of an entry `private`."""
    stored: dict[str, dict[str, bytes]] = {"private": {}}

    def create_repo(_: HfApi, name: str, *, private: bool, exist_ok: bool) -> RepoUrl:
        assert exist_ok
        stored[name] = {}
        stored["private"] |= {name: b""} if private else {}
        return RepoUrl(f"https://huggingface.co/{name}")

    def upload_folder(_: HfApi, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        stored[repo_id] = {path.name: path.read_bytes() for path in folder_path.iterdir()}

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return stored


def test_an_upload_has_every_file(
    run: Path, hub: dict[str, dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--to", "hub", "--repo", "me/mine"]) == 0
    assert capsys.readouterr().out.strip() == "https://huggingface.co/me/mine"
    files = {path.name: path.read_bytes() for path in (run / "dpo" / "model").iterdir()}
    stored = hub["me/mine"]
    assert {name: stored[name] for name in files} == files and set(stored) == {*files, "README.md"}
    assert b"# mine" in stored["README.md"]
    options = ["--to", "hub", "--repo", "me/adapters", "--adapter", "--public"]
    assert main([str(run / "sft"), *options]) == 2
    assert "upload that model first, and name it with --base" in capsys.readouterr().err
    assert main([str(run / "sft"), *options, "--base", "me/base"]) == 0
    stored = hub["me/adapters"]
    assert json.loads(stored["adapter_config.json"])["base_model_name_or_path"] == "me/base"
    assert b"base_model: me/base" in stored["README.md"] and [*hub["private"]] == ["me/mine"]


def test_a_refused_upload_is_one_clear_message(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--to", "hub"]) == 2
    assert "--repo OWNER/NAME" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody listens
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    assert main([str(run), "--to", "hub", "--repo", "me/mine"]) == 2
    error = capsys.readouterr().err
    assert "me/mine cannot be uploaded" in error and "run `hf auth login`" in error


def test_gguf_runs_the_converter_or_prints_the_commands(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    output = tmp_path / "my model.gguf"
    assert main([str(run), "--to", "gguf", "--output", str(output)]) == 2
    printed = capsys.readouterr().err
    model = (run / "dpo" / "model").resolve()
    assert f"python llama.cpp/convert_hf_to_gguf.py {model} --outfile '{output}' --outtype auto" in printed
    assert "pip install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt" in printed
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text("import sys\nfrom pathlib import Path\nPath(sys.argv[3]).write_text(' '.join(sys.argv[1:]))\n")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    assert main([str(run), "--to", "gguf", "--output", str(output)]) == 0
    assert output.read_text() == f"{model} --outfile {output} --outtype auto"
    output.unlink()
    script.write_text("import sys\nopen(sys.argv[3], 'w').close()\nsys.exit('this family is unknown')\n")
    assert main([str(run), "--to", "gguf", "--output", str(output)]) == 2
    assert "this family is unknown" in capsys.readouterr().err and not output.exists()


def test_a_trained_tokenizer_needs_no_converter_to_be_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    trained = shutil.copytree(run, tmp_path / "trained")
    file = trained / "dpo" / "config.yaml"
    file.write_text(file.read_text().replace("tokenizer: null", "tokenizer: train"))
    assert main([str(trained), "--to", "gguf"]) == 2
    printed = capsys.readouterr().err
    assert f"does not support the tokenizer of {trained.resolve()}" in printed and "git clone" not in printed


def test_unknown_stages_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "m", 0)
    assert main([str(tmp_path / "m"), "--to", "folder"]) == 2
    assert "is not a stage of a run, so its data and results are unknown" in capsys.readouterr().err
