"""The command `zerochat export`: a finished stage as a folder, as adapters, on the hub, or as a GGUF file."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import OptionParser, UserError, exit_status, first_line
from pipeline.export.model_card import model_card
from pipeline.export.source import TrainedStage, find_stage
from pipeline.files import read_object
from pipeline.installation import EXPORT

FORMATS = ("folder", "adapter", "hub", "gguf")
SUFFIXES = {"adapter": "-adapter", "gguf": ".gguf"}  # of the default name
CONVERTER = "convert_hf_to_gguf.py"
USAGE = """\
Export a finished stage of a run, by default the newest one.

{export} runs/x --to folder --output my-model     a complete model with a model card
{export} runs/x --to adapter --output my-adapter  adapters in peft's format, if adapters were trained
{export} runs/x --to hub --repo owner/name        upload the folder (--adapter: the adapters)
{export} runs/x --to gguf --output my-model.gguf  one file for llama.cpp
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one export; return the exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _export(options), debug=options.debug)


def _export(options: argparse.Namespace) -> int:
    stage = find_stage(options.path)
    output = options.output or Path(f"{stage.run.name}-{stage.name}{SUFFIXES.get(options.to, '')}")
    if options.to == "folder":
        write_folder(stage, output, options.license)
        architecture = read_object(output / "config.json").get("architectures", [""])[0]
        auto = "MultimodalLM" if architecture.endswith("ForConditionalGeneration") else "CausalLM"
        print(f"{output}: load it with AutoModelFor{auto}.from_pretrained, or serve it with vLLM")
    elif options.to == "adapter":
        write_adapter(stage, output, options.license, options.base)
        print(f"{output}: load it with PeftModel.from_pretrained on top of {options.base or stage.adapter_base}")
    elif options.to == "hub":
        print(upload(stage, options))
    else:
        print(write_gguf(stage, output, options.converter))
    return 0


def write_folder(stage: TrainedStage, output: Path, licence: str | None) -> None:
    """Copy the model and write its card. Raises UserError if the folder has files."""
    with _new_folder(output) as folder:
        shutil.copytree(stage.model, folder, dirs_exist_ok=True)
        (folder / "README.md").write_text(model_card(stage, title=output.name, licence=licence), encoding="utf-8")


def write_adapter(stage: TrainedStage, output: Path, licence: str | None, base: str | None) -> None:
    """Copy the adapters and write their card. Raises UserError if the stage has no adapters or no stored base model.

    base: the name that the adapters' configuration gives to their base model; default: its hub name or folder
    """
    source = stage.folder / "adapter"
    if not (source / "adapter_config.json").is_file():
        reason = "an earlier version trained it" if stage.lora_rank else "it trained all parameters"
        raise UserError(f"{stage.folder} has no adapters, because {reason}: export the complete model with --to folder")
    base = base or stage.adapter_base
    if base is None:
        raise UserError(
            f"the adapters of {stage.folder} belong to a base model with random weights, which no folder has: export "
            "the complete model with --to folder"
        )
    with _new_folder(output) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        file = folder / "adapter_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        card = model_card(stage, title=output.name, licence=licence, adapter_base=base)
        (folder / "README.md").write_text(card, encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
            if (stage.model / name).is_file():  # the chat template belongs to the adapters
                shutil.copy(stage.model / name, folder)


def upload(stage: TrainedStage, options: argparse.Namespace) -> str:
    """Upload the folder or the adapters to the hub; return the address. Raises UserError if the hub refuses."""
    from huggingface_hub import HfApi

    if not options.repo:
        raise UserError("--to hub needs the name of a repository: set --repo OWNER/NAME")
    base = options.base or stage.adapter_base
    if options.adapter and base is not None and (Path(base).is_absolute() or Path(base).exists()):
        raise UserError(
            f"the adapters belong to {base}, which the hub does not have: upload that model first, and name it with "
            "--base OWNER/NAME"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / options.repo.rpartition("/")[2]
        if options.adapter:
            write_adapter(stage, folder, options.license, base)
        else:
            write_folder(stage, folder, options.license)
        api = HfApi()
        try:
            repository = api.create_repo(options.repo, private=not options.public, exist_ok=True)
            api.upload_folder(
                repo_id=repository.repo_id, folder_path=folder, commit_message=f"Upload the {stage.name} model"
            )
        except Exception as problem:  # no network, no access, a bad name: the client raises errors of several libraries
            raise UserError(
                f"{options.repo} cannot be uploaded ({first_line(problem)}): run `hf auth login` with a token that may "
                "write, and check the name and the network"
            ) from problem
    return str(repository)


def write_gguf(stage: TrainedStage, output: Path, converter: Path | None) -> Path:
    """Convert the model with llama.cpp's converter. Raises UserError, with the commands, if there is none."""
    if stage.config.model.tokenizer == "train":
        raise UserError(
            f"llama.cpp does not support the tokenizer of {stage.model}: it has a list of published tokenizers, and a "
            "tokenizer that zerochat trained (model.tokenizer=train) is not in this list. Train from a base model with "
            "its own tokenizer, or use --to folder"
        )
    script = converter or _find_converter()
    arguments = [str(stage.model), "--outfile", str(output), "--outtype", "auto"]
    if script is None or not script.is_file():
        raise UserError(
            f"llama.cpp's {CONVERTER} was not found (--converter, LLAMA_CPP, PATH). Run these commands:\n"
            "  git clone --depth 1 https://github.com/ggml-org/llama.cpp\n"
            f"  pip install -r llama.cpp/requirements/requirements-{CONVERTER.removesuffix('.py')}.txt\n"
            f"  {shlex.join(['python', f'llama.cpp/{CONVERTER}', *arguments])}"
        )
    if output.exists():
        raise UserError(f"{output} exists: set another --output")
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not output.is_file():
        output.unlink(missing_ok=True)
        lines = done.stderr.strip().splitlines()
        raise UserError(
            f"{script} failed: {lines[-1] if lines else 'without a message'}. Run it yourself: {shlex.join(command)}"
        )
    return output


def _find_converter() -> Path | None:
    """Return llama.cpp's converter: in the folder that LLAMA_CPP names, or on the path of commands."""
    folder = os.environ.get("LLAMA_CPP")
    if folder:
        return Path(folder) / CONVERTER
    found = shutil.which(CONVERTER)
    return Path(found) if found else None


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Provide a folder that gets the name `output` when it is complete.

    Raises UserError if `output` has files, or cannot be created.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not empty: set another --output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{output.name}."
        with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent, ignore_cleanup_errors=True) as staging:
            Path(staging).chmod(0o755)
            yield Path(staging)
            Path(staging).replace(output)
    except OSError as problem:
        reason = problem.args[0][0][2] if isinstance(problem, shutil.Error) else problem  # it lists all files
        raise UserError(f"{output} cannot be written ({reason}): free some space, or set another --output") from problem


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog=EXPORT,
        usage=f"{EXPORT} --to FORMAT [options] path",
        description=USAGE.format(export=EXPORT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="a run, or a stage of a run")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format")
    parser.add_argument("--output", type=Path, help="the new folder or file (default: named after run and stage)")
    parser.add_argument("--repo", metavar="OWNER/NAME", help="repository on the hub")
    parser.add_argument("--adapter", action="store_true", help="--to hub uploads the adapters, not the complete model")
    parser.add_argument("--base", metavar="NAME", help="base model of the adapters, if it has another name by now")
    parser.add_argument("--public", action="store_true", help="a new repository is public (default: private)")
    parser.add_argument("--license", metavar="ID", help="licence in the model card, for example apache-2.0")
    parser.add_argument("--converter", type=Path, metavar="FILE", help=f"llama.cpp's {CONVERTER}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser
