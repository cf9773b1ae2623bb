"""What a path given to chat.py means: a run, a stage of a run, or a model folder."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.config.stages import ANSWERING, STAGES
from pipeline.errors import UserError
from pipeline.launch.manifest import Manifest


@dataclass(frozen=True)
class ChatModel:
    """A model folder, and what to call it."""

    name: str
    folder: Path


def find(path: Path) -> ChatModel:
    """The model to talk to: of a run the newest finished stage's. Raises UserError where there is none."""
    path = path.expanduser()
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder; give a run (runs/NAME) or a model folder")
    if (path / "config.json").is_file():
        return ChatModel(path.parent.name if path.name == "model" else path.name, path)
    if (path / "model" / "config.json").is_file():
        return ChatModel(path.name, path / "model")
    for stage in Manifest.read(path).answering():
        if _finished(path, stage):
            return ChatModel(stage, path / stage / "model")
    if _is_run(path):
        raise UserError(
            f"{path} has no finished stage to talk to (ppo, dpo or sft); the command that started the run goes on with "
            "it"
        )
    raise UserError(f"{path} is neither a run nor a model folder: it has no config.json and no stages{_runs_in(path)}")


def find_each(path: Path, names: str) -> list[ChatModel]:
    """The models to compare: `names` are stages of the run at `path`, or folders, with commas between."""
    chosen = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name in ANSWERING:
            if not _finished(path.expanduser(), name):
                raise UserError(f"{path} has no finished {name} stage; --compare takes stages of the run, or folders")
            chosen.append(ChatModel(name, path.expanduser() / name / "model"))
        elif Path(name).expanduser().is_dir():
            chosen.append(find(Path(name)))
        else:
            raise UserError(f"--compare {name}: neither a stage that answers ({', '.join(ANSWERING)}) nor a folder")
    if not chosen:
        raise UserError("--compare needs names: sft,ppo, or folders")
    return chosen


def _finished(run: Path, stage: str) -> bool:
    """Whether a stage is done. A run folder that lost its manifest is taken by what lies in it."""
    if (run / "manifest.json").is_file():
        return Manifest.read(run).finished(stage)
    return (run / stage / "model" / "config.json").is_file()


def _runs_in(folder: Path) -> str:
    """The newest run of a folder of runs, as something to write instead."""
    runs = sorted((path for path in folder.iterdir() if _is_run(path)), key=lambda path: path.stat().st_mtime)
    return f"; the newest run in it is {runs[-1]}" if runs else ""


def _is_run(path: Path) -> bool:
    return (path / "manifest.json").is_file() or any((path / stage).is_dir() for stage in STAGES)
