"""Search for the model folder of a path: a run, a stage of a run, or a model folder."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.config.stages import ANSWERING
from pipeline.errors import UserError
from pipeline.installation import EXPORT
from pipeline.launch.manifest import Manifest

BASE = "base"


@dataclass(frozen=True)
class ChatModel:
    """A model folder with a display name.

    is_base: `folder` is a run, and the model is the base model that the run started from
    """

    name: str
    folder: Path
    is_base: bool = False


def find(path: Path) -> ChatModel:
    """Return the model of a path. For a run, return the model of its newest finished stage.

    Raises UserError if there is no model.
    """
    path = path.expanduser()
    if not path.is_dir():
        raise UserError(_absent(path))
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return ChatModel((folder.parent if folder.name == "model" else folder).name, folder)
    for model in _stages(path):
        return model
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{path} has only adapters; give the run, or a folder of `{EXPORT} RUN --to folder`")
    raise UserError(
        f"{path} has neither a model (config.json) nor a finished stage ({', '.join(ANSWERING)}): "
        "give a run (runs/NAME) or a model folder, or resume the run with the training command that started it"
    )


def find_each(path: Path, names: str, option: str = "--compare") -> list[ChatModel]:
    """Return the models that `option` names. Raises UserError for a name that is neither a finished stage nor a folder.

    `names` are stages of the run at `path`, `base` for its base model, or folders, separated by commas.
    """
    if not path.expanduser().is_dir():
        raise UserError(_absent(path))
    chosen = []
    for name in filter(None, (item.strip() for item in names.split(","))):
        if name == BASE:
            if not _names_base(path.expanduser()):
                raise UserError(f"{path} has no stage with a config.yaml, which names the base model; give a run")
            chosen.append(ChatModel(BASE, path.expanduser(), is_base=True))
        elif name in ANSWERING:
            if not _finished(path.expanduser(), name):
                raise UserError(f"{path} has no finished {name} stage; {option} takes stages of the run, or folders")
            chosen.append(ChatModel(name, path.expanduser() / name / "model"))
        elif Path(name).expanduser().is_dir():
            chosen.append(find(Path(name)))
        else:
            raise UserError(
                f"{option} {name}: neither a stage that answers ({', '.join(ANSWERING)}), nor {BASE}, nor a folder"
            )
    if not chosen:
        raise UserError(f"{option} needs names: sft,ppo, or folders")
    return chosen


def _absent(path: Path) -> str:
    if path.expanduser().is_file():
        return f"{path} is a file; give a run (runs/NAME) or a model folder in Hugging Face format"
    return f"{path}: there is no such folder; give a run (runs/NAME) or a model folder"


def find_all(path: Path) -> list[ChatModel]:
    """Return the models of all finished stages of a run, newest first, and its base model, if the run names it.

    Raises UserError if there is no model.
    """
    newest, run = find(path), path.expanduser()
    stages = _stages(run)
    if newest not in stages:
        return [newest]  # a model folder or a stage
    return [*stages, *([ChatModel(BASE, run, is_base=True)] if _names_base(run) else [])]


def _stages(run: Path) -> list[ChatModel]:
    """Return the models of the finished stages of a run, newest first."""
    return [
        ChatModel(stage, run / stage / "model") for stage in Manifest.read(run).answering() if _finished(run, stage)
    ]


def _names_base(run: Path) -> bool:
    return next(run.glob("*/config.yaml"), None) is not None


def _finished(run: Path, stage: str) -> bool:
    """Return whether a stage has finished. Without a manifest, a stage with a model has finished."""
    if (run / "manifest.json").is_file():
        return Manifest.read(run).finished(stage)
    return (run / stage / "model" / "config.json").is_file()
