"""The stage that is exported: its folder, its configuration, its results, and the models that it came from."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.chat.folder import find
from pipeline.config.schema import ModelConfig, RunConfig
from pipeline.config.stages import ANSWERING, POLICIES
from pipeline.errors import UserError
from pipeline.files import read_object
from pipeline.launch.worker import read_config


@dataclass(frozen=True)
class TrainedStage:
    """A stage with its folder, its settings and, if it is exported, the stages that it depends on."""

    name: str
    folder: Path
    config: RunConfig
    earlier: tuple["TrainedStage", ...] = ()

    @property
    def lora_rank(self) -> int:
        """The rank of the adapters that the stage trained; 0 if it trained all parameters."""
        return int(getattr(self.config, self.name).lora.rank)

    @property
    def history(self) -> tuple["TrainedStage", ...]:
        """The stages that it depends on and, as the last one, itself."""
        return *self.earlier, self

    @property
    def run(self) -> Path:
        return self.folder.parent

    @property
    def model(self) -> Path:
        """The exported model, in Hugging Face format."""
        return self.folder / "model"

    @property
    def summary(self) -> dict[str, Any]:
        """The results of the stage; empty without summary.json."""
        return read_object(self.folder / "summary.json")

    @property
    def base(self) -> str | None:
        """The hub name or the absolute folder of the base model; None if training started from random weights."""
        first = next(stage for stage in self.history if stage.name != "reward")  # its model may have another base
        return _location(first.config.model)

    @property
    def adapter_base(self) -> str | None:
        """The model that the adapters of this stage belong to: the base model for SFT, the actor for DPO and PPO."""
        if self.name == "sft":
            return None if self.base is None else _model_in(self.base)
        return _model_in(str(self.run / "sft" if self.config.actor is None else Path(self.config.actor).resolve()))


def find_stage(path: Path) -> TrainedStage:
    """Return the newest finished stage of a run that has a chat model, or the stage at `path`. Raises UserError."""
    model = find(path).folder
    folder = model.parent.resolve()
    if model.name != "model" or not (folder / "config.yaml").is_file():
        raise UserError(f"{path} is not a stage of a run, so its data and results are unknown; give a run or RUN/STAGE")
    if folder.name not in ANSWERING:
        raise UserError(
            f"{path} is the {folder.name} stage, which has no chat model; export one of {', '.join(ANSWERING)}"
        )
    stage = _read(folder)
    earlier = {each.folder: each for each in _earlier(stage)}  # two policies may have learned from one reward model
    return replace(stage, earlier=tuple(earlier.values()))


def _earlier(stage: TrainedStage) -> Iterator[TrainedStage]:
    """Yield the stages that a stage depends on, oldest first, if their settings are still there."""
    config = stage.config
    locations = {"sft": config.actor} if stage.name in POLICIES else {}
    if stage.name == "ppo" and config.ppo.reward_model:
        locations["reward"] = config.reward_path
    for name, location in locations.items():
        folder = stage.run / name if location is None else Path(location).resolve()
        folder = folder.parent if folder.name == "model" else folder
        if (folder / "config.yaml").is_file() and (folder / "model").is_dir():
            earlier = _read(folder)
            yield from _earlier(earlier)
            yield earlier


def _read(folder: Path) -> TrainedStage:
    try:
        return TrainedStage(folder.name, folder, read_config(folder))
    except ValueError as problem:
        raise UserError(
            f"{folder}/config.yaml was written by another version of zerochat, so the data and settings of the model "
            "are unknown: export it with that version"
        ) from problem


def _model_in(location: str) -> str:
    """Return the model of a stage folder. Other folders and hub names are returned unchanged."""
    model = Path(location) / "model"
    return str(model) if model.is_dir() else location


def _location(model: ModelConfig) -> str | None:
    """Return the hub name or the absolute folder of a model: other tools take a relative folder for a hub name."""
    if model.weights == "random":
        return None
    return model.hub if model.path is None else str(Path(model.path).expanduser().absolute())
