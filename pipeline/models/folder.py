"""Find the model in a folder that a configuration key names, or say what the folder has instead."""

import os
import re
import shlex
from pathlib import Path

from pipeline.config.stages import ANSWERING, STAGES
from pipeline.errors import UserError


def model_folder(location: str | Path, key: str = "model") -> Path:
    """Return the Hugging Face folder at a path: the path itself, or `model` in a stage folder.

    Raises UserError with the configuration key `key` if neither has a config.json.
    """
    folder = Path(os.path.expanduser(location))
    for candidate in (folder, folder / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    if folder.suffix == ".gguf" or (folder.is_dir() and any(folder.glob("*.gguf"))):
        raise UserError(
            f"{key}={location} is in GGUF format, which cannot be trained: set the folder of the original model in "
            "Hugging Face format (config.json and safetensors)"
        )
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{key}={location} has only adapters: merge them into their base model, and set {key} to the new folder: "
            f"{merge_command(location)}"
        )
    if folder.is_file():
        raise UserError(f"{key}={location} is a file: set the folder of the model, {key}={folder.parent}")
    if not folder.is_dir():
        is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(location)) and not folder.parent.is_dir()
        hub = f"; download a model of the hub first: hf download {location} --local-dir FOLDER" if is_name else ""
        raise UserError(f"{key}={location}: there is no such folder (relative paths start at {Path.cwd()}){hub}")
    likely = {"actor": ANSWERING, "reward": ("reward",)}.get(key, reversed(STAGES))
    stages = [stage for stage in likely if (folder / stage / "model" / "config.json").is_file()]
    if stages:
        raise UserError(f"{key}={location} is a run folder: select one of its stages, {key}={folder / stages[0]}")
    if any((folder / name).is_dir() for name in ("checkpoints", "model")):
        raise UserError(f"{key}={location} is an unfinished stage: run its command again to finish it")
    raise UserError(f"{key}={location} is not a model folder: it has no config.json (Hugging Face format, safetensors)")


def merge_command(adapters: str | Path) -> str:
    """Return the command that merges a folder of adapters into their base model."""
    program = (
        "import sys; from peft import AutoPeftModelForCausalLM as Model; from transformers import AutoTokenizer; "
        "old, new = sys.argv[1:]; model = Model.from_pretrained(old); "
        "base = next(iter(model.peft_config.values())).base_model_name_or_path; "
        "AutoTokenizer.from_pretrained(base).save_pretrained(new); model.merge_and_unload().save_pretrained(new)"
    )
    return shlex.join(["python", "-c", program, str(adapters), f"{Path(adapters).name}-merged"])
