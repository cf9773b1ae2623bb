"""Read and write manifest.json, which records the inputs and outputs of each stage, and decide which stages must run.

- A finished stage with unchanged inputs is skipped.
- An unfinished stage with unchanged inputs resumes.
- A stage with changed inputs runs again. Its old folder is renamed to <stage>.1, <stage>.2, ... If a command has the
  inputs of an old folder again, the folder gets its name back, and the stage is skipped or resumes.

The inputs of a stage include the hashes of the models of earlier stages. A change of one stage therefore also runs the
later stages again. The tokenizer of a run has inputs of its own: the files of `model.tokenizer` (or of the model) and
`model.chat_template`. Only the first launcher writes this file.
"""

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from pipeline.config.schema import RunConfig
from pipeline.config.stages import POLICIES
from pipeline.errors import UserError
from pipeline.files import read_object, read_plan, read_record, write_json
from pipeline.launch.fingerprint import (
    PPO_SELECTION_KEYS,
    digest,
    flatten,
    hash_request,
    hash_tree,
    run_identity,
    with_selected,
)

Action = Literal["skip", "resume", "run"]
# In an old folder: its record, the tokenizer that the stage made, and its files for TensorBoard.
RECORD, TOKENIZER, TENSORBOARD = "record.json", "tokenizer", "tensorboard"


class _Consumed(BaseModel):
    """The recorded inputs of a stage."""

    model_config = ConfigDict(extra="allow")
    config: str
    settings: dict[str, Any]
    data: str
    models: dict[str, str]


class _Record(BaseModel):
    """The record of one stage."""

    model_config = ConfigDict(extra="allow")
    status: Literal["running", "stopped", "finished", ""] = ""
    consumed: _Consumed | None = None
    produced: dict[str, str] = {}
    judges: dict[str, str] = {}
    started: str = ""
    finished: str = ""


class _File(BaseModel):
    """The content of manifest.json."""

    identity: dict[str, dict[str, Any]]
    request: str = Field(validation_alias=AliasChoices("request", "asked"))  # the second is the name before 0.2.0
    stages: dict[str, _Record]


@dataclass(frozen=True)
class Decision:
    """What the launcher does with a stage. `because` is the reason, if there is one."""

    action: Action
    because: str = ""


@dataclass
class Manifest:
    """The content of manifest.json. Every change is written to the file at once and atomically."""

    run_dir: Path
    identity: dict[str, Any] = field(default_factory=dict)
    request: str = ""
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> "Manifest":
        """Return the manifest of a run folder, empty if it has none. Raise UserError if the file is unreadable."""
        remedy = "repair it, or set another name= for a new run"
        content = read_record(run_dir / "manifest.json", _File, remedy=remedy)
        if content is None:
            return cls(run_dir)
        return cls(run_dir, **content.model_dump(exclude_unset=True))

    def save(self) -> None:
        content = {"identity": self.identity, "request": self.request, "stages": self.stages}
        write_json(self.run_dir / "manifest.json", content)

    def finished(self, stage: str) -> bool:
        """Return whether a stage has finished and its exported model exists."""
        is_finished = self.stages.get(stage, {}).get("status") == "finished"
        return is_finished and (self.run_dir / stage / "model" / "config.json").is_file()

    def answering(self) -> list[str]:
        """Return the stages that train a chat model: PPO and DPO, the one that finished last first, then SFT."""
        policies = reversed(POLICIES)
        return [*sorted(policies, key=lambda name: self.stages.get(name, {}).get("finished", ""), reverse=True), "sft"]

    def product(self, stage: str) -> Path | None:
        """Return the model folder of a finished stage; None for an unfinished one. Raise UserError if it is missing."""
        if self.stages.get(stage, {}).get("status") != "finished":
            return None
        model = self.run_dir / stage / "model"
        if not self.finished(stage):
            raise UserError(
                f"{model} is missing, although the {stage} stage has finished: run stage={stage} (or stage=all) with "
                "the same run folder to export the model again"
            )
        return model

    def begin(self, stage: str, consumed: dict[str, Any], judges: dict[str, str] | None = None) -> None:
        """Record that a stage runs with these inputs and judges (`judge_files`).

        The start time of a resumed stage does not change.
        """
        record = self.stages.get(stage, {})
        is_resumed = "consumed" in record and _changes(self.run_dir / stage, record, consumed) is None
        started = record.get("started", _now()) if is_resumed else _now()
        record = {"status": "running", "consumed": consumed, "produced": {}, "judges": judges or {}, "started": started}
        self.stages[stage] = record
        self.save()

    def changed_judges(self, stage: str, judges: dict[str, str]) -> list[str]:
        """Return the keys of judges whose files have changed since the last start of a stage."""
        recorded = self.stages.get(stage, {}).get("judges", {})
        return [key for key, content in judges.items() if recorded.get(key, content) != content]

    def stop(self, stage: str) -> None:
        """Record that a stage was interrupted or failed. The next start resumes the stage."""
        self.stages[stage]["status"] = "stopped"
        self.save()

    def finish(self, stage: str) -> None:
        """Record that a stage has finished, with the content hash of its model."""
        produced = {"model": hash_tree(self.run_dir / stage / "model")}
        self.stages[stage].update(status="finished", produced=produced, finished=_now())
        self.save()

    def claim(self, config: RunConfig, stages: list[str]) -> None:
        """Record the identity and the request of this run, and end a renaming that a killed command began (`keep`).

        Raise UserError if the folder has another model or data.
        """
        identity, request = run_identity(config), hash_request(config, stages)
        if self.identity and self.stages:
            old, new = (
                {f"{kind}.{key}": value for kind in identity for key, value in each[kind].get("source", {}).items()}
                for each in ({**identity, **self.identity}, identity)
            )
            if changes := _changed_keys(old, new):
                raise UserError(
                    f"{self.run_dir} belongs to another configuration: {'; '.join(changes)}. Choose another name=, or "
                    f"use the original configuration ({self.run_dir}/*/config.yaml)"
                )
        if (identity, request) != (self.identity, self.request):  # else the report is newer than the file
            self.identity, self.request = identity, request
            self.save()
        for stage in self.stages:
            self.keep(stage)

    def decide(self, stage: str, consumed: dict[str, Any]) -> Decision:
        """Decide whether to skip, resume or run a stage whose inputs are now `consumed`."""
        record = self.stages.get(stage)
        if record is None:
            return Decision("run")
        if "consumed" not in record:
            return Decision("run", "manifest.json does not record its inputs")
        folder = self.run_dir / stage
        if (because := _changes(folder, record, consumed)) is not None:
            return Decision("run", because)
        if record["status"] != "finished" and folder.is_dir():
            return Decision("resume")
        if self.finished(stage):
            return Decision("skip")
        if has_checkpoints(folder):
            return Decision("resume", "its model is gone; it is exported again from the newest checkpoint")
        return Decision("run", "its model and its checkpoints are gone")

    def set_aside(self, stage: str) -> Path | None:
        """Rename the folder of a stage that runs again, with all that belongs to it. Return the new path.

        Return None if there is no folder. A killed process may leave the files in the folder (`keep`).
        """
        folder, tokenizer = self.run_dir / stage, self.run_dir / TOKENIZER
        curves = self.run_dir / TENSORBOARD / stage
        if folder.is_symlink() and not folder.exists():
            raise UserError(
                f"{folder} is a link to {folder.readlink()}, which is missing: restore that folder (mount its disk), "
                f"or remove the link to run the {stage} stage again"
            )
        is_here = folder.is_dir() and not folder.is_symlink()  # the target of a link may be on another disk
        if folder.is_dir():
            write_json(folder / RECORD, self.stages.get(stage, {}))
        if is_here and curves.exists():
            curves.rename(folder / TENSORBOARD)
        if self._makes_tokenizer(stage) and tokenizer.exists():
            tokenizer.rename(folder / TOKENIZER) if is_here else move_aside(tokenizer)
        return move_aside(folder) if folder.exists() else None

    def restore(self, stage: str, consumed: dict[str, Any]) -> Path | None:
        """Give the newest old folder with these inputs its name back. Return its path before; None if there is none.

        The folder of the stage must have been set aside. After a kill, the next call continues.
        """
        names = {path: path.name.removeprefix(f"{stage}.") for path in self.run_dir.glob(f"{stage}.*")}
        for folder in sorted((p for p, n in names.items() if n.isdecimal()), key=lambda p: -int(names[p])):
            record, has_model = read_object(folder / RECORD), (folder / "model" / "config.json").is_file()
            if "consumed" not in record or _changes(folder, record, consumed) is not None:
                continue
            if has_model or has_checkpoints(folder):
                self.stages[stage] = record
                self.save()
                folder.rename(self.run_dir / stage)
                self.keep(stage)
                return folder
        return None

    def keep(self, stage: str) -> None:
        """Remove the record from the folder of a stage that is not set aside, and put back what was outside of it."""
        folder = self.run_dir / stage
        if (folder / RECORD).exists():  # a folder of a disk without write permission has none
            (folder / RECORD).unlink()
        for name, place in ((TOKENIZER, self.run_dir / TOKENIZER), (TENSORBOARD, self.run_dir / TENSORBOARD / stage)):
            if (folder / name).is_dir() and not place.exists():
                place.parent.mkdir(exist_ok=True)
                (folder / name).rename(place)

    def _makes_tokenizer(self, stage: str) -> bool:
        """Return whether a stage makes the tokenizer of the run from its own inputs."""
        return stage == "sft" or (stage == "reward" and "sft" not in self.stages)

    def check_tokenizer(self, stage: str, consumed: dict[str, Any]) -> None:
        """Raise UserError if the SFT stage made the run's tokenizer from files that have changed since then.

        A reward model that starts from the base model would get new weights and an old tokenizer.
        """
        old, new = self.stages.get("sft", {}).get("consumed", {}), consumed.get("tokenizer")
        if stage == "reward" and "tokenizer" in consumed and old.get("tokenizer", new) != new:
            raise UserError(
                f"the tokenizer's files (model.path, model.tokenizer, model.chat_template) changed since the sft stage "
                f"made {self.run_dir / 'tokenizer'}: run stage=sft (or stage=all) with the same run folder first, or "
                "restore the files"
            )


def _changes(folder: Path, record: dict[str, Any], consumed: dict[str, Any]) -> str | None:
    """Return how the inputs in the record of a stage's folder differ from `consumed`; None if they do not."""
    recorded = _with_newer_keys(record["consumed"], consumed)
    recorded, consumed = (with_selected(inputs, read_plan(folder)) for inputs in (recorded, consumed))
    if record["status"] == "finished" and consumed["settings"].get("ppo.export") == "last":
        # The guard has used the evaluations of a finished stage. Other evaluations do not change its model.
        recorded, consumed = _without_selection(recorded), _without_selection(consumed)
    return None if recorded == consumed else differences(recorded, consumed)


def has_checkpoints(stage_dir: Path) -> bool:
    """Return whether a stage has a complete checkpoint."""
    return any((stage_dir / "checkpoints").glob("step-*[0-9]"))


def _with_newer_keys(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return recorded inputs with the defaults of keys that the record lacks, so that an update runs no stage again."""
    defaults = flatten(RunConfig.defaults())
    newer = {key: defaults[key] for key in new["settings"] if key in defaults and key not in old["settings"]}
    return {**old, "settings": {**old["settings"], **newer}}


def _without_selection(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of PPO without the keys of evaluations and without the judge's file."""
    settings = {key: value for key, value in inputs["settings"].items() if key not in PPO_SELECTION_KEYS}
    others = {key: value for key, value in inputs.items() if key != "judge"}
    return {**others, "settings": settings, "config": digest(settings)}


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describe how the inputs of a stage have changed."""
    changes = _changed_keys(old["settings"], new["settings"])
    changes += ["the data changed"] if any(old.get(key) != new.get(key) for key in ("data", "files")) else []
    changes += ["the tokenizer's files changed"] if old.get("tokenizer") != new.get("tokenizer") else []
    functions = {old.get("reward_function"), new.get("reward_function")} - {None}
    changes += ["the reward function's file changed"] if len(functions) == 2 else []
    changes += ["the judge's file changed"] if old.get("judge") != new.get("judge") else []
    roles = [role for role in new["models"] if old["models"].get(role) != new["models"][role]]
    changes += [f"its {role} model changed" for role in roles]
    return "; ".join(changes) or "its settings changed"


def _changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return one text per key with another value, at most three, and the number of further keys."""
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    changes = [f"{key} was {old.get(key)}, is {new.get(key)}" for key in keys[:3]]
    return changes + ([f"{len(keys) - 3} more keys"] if len(keys) > 3 else [])


def move_aside(folder: Path) -> Path:
    """Rename a stage folder to the first free name of <stage>.1, <stage>.2, ... Return the new path."""
    number = 1
    while os.path.lexists(path := folder.with_name(f"{folder.name}.{number}")):
        number += 1
    return folder.rename(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
