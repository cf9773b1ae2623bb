"""manifest.json: what each stage of a run consumed and produced, and so what has to run.

A finished stage that would consume the same again is skipped; an unfinished one resumes; a changed one is run
again, its old folder kept beside it as <stage>.1, .2, ... A stage consumes the hash of the models before it,
so a change travels down by itself. Only the launcher's first process writes this file.
"""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pipeline.config.places import model_folder
from pipeline.config.schema import RunConfig
from pipeline.config.stages import POLICIES
from pipeline.errors import UserError
from pipeline.evaluation.user_function import function_file
from pipeline.files import write_whole
from pipeline.installation import TRAIN
from pipeline.launch.fingerprint import (
    HOW_ROLLOUTS,
    HashCache,
    data_content,
    data_source,
    digest,
    flat,
    model_content,
    model_source,
    stage_settings,
)

Action = Literal["skip", "resume", "run"]


@dataclass(frozen=True)
class Decision:
    """What to do with a stage. `because` says what changed, where something did."""

    action: Action
    because: str = ""


@dataclass
class Manifest:
    """The file in memory. Every change is written at once, whole or not at all."""

    run_dir: Path
    identity: dict[str, Any] = field(default_factory=dict)
    asked: str = ""
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> "Manifest":
        """The manifest of a run folder; an empty one where there is none. Raises UserError if it can't be read."""
        file = run_dir / "manifest.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return cls(run_dir, content["identity"], content["asked"], content["stages"])
        except FileNotFoundError:
            return cls(run_dir)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise UserError(
                f"{file} cannot be read ({problem}): repair it, or set another name= for a new run"
            ) from problem

    def save(self) -> None:
        content = {"identity": self.identity, "asked": self.asked, "stages": self.stages}
        write_whole(self.run_dir / "manifest.json", json.dumps(content, indent=2) + "\n")

    def finished(self, stage: str) -> bool:
        """True where a stage is done and its model is there."""
        done = self.stages.get(stage, {}).get("status") == "finished"
        return done and (self.run_dir / stage / "model" / "config.json").is_file()

    def answering(self) -> list[str]:
        """The stages that make a model to talk to: of PPO and DPO the one that finished last in front, SFT behind."""
        policies = reversed(POLICIES)
        return [*sorted(policies, key=lambda name: self.stages.get(name, {}).get("finished", ""), reverse=True), "sft"]

    def product(self, stage: str) -> Path | None:
        """The model of a stage that is done; None where it is not. Raises UserError where the model is gone since."""
        if self.stages.get(stage, {}).get("status") != "finished":
            return None
        model = self.run_dir / stage / "model"
        if not self.finished(stage):
            raise UserError(f"{model} is gone: run stage={stage} (or stage=all) there, which makes it again")
        return model

    def begin(self, stage: str, consumed: dict[str, Any]) -> None:
        record = self.stages.get(stage, {})
        same = bool(record) and _as_known_now(record["consumed"], consumed) == consumed
        started = record["started"] if same else _now()
        self.stages[stage] = {"status": "running", "consumed": consumed, "produced": {}, "started": started}
        self.save()

    def stop(self, stage: str) -> None:
        """The stage was interrupted or failed; the next start resumes it."""
        self.stages[stage]["status"] = "stopped"
        self.save()

    def finish(self, stage: str, cache: HashCache) -> None:
        produced = {"model": cache.tree(self.run_dir / stage / "model")}
        self.stages[stage].update(status="finished", produced=produced, finished=_now())
        self.save()

    def claim(self, config: RunConfig, stages: list[str]) -> None:
        """Note what this run is and what was asked of it. Raises UserError where the folder is another run's."""
        identity = run_identity(config)
        if self.identity and self.stages:
            differs = [part for part in ("model", "data") if self.identity[part]["source"] != identity[part]["source"]]
            if differs:
                raise UserError(self._foreign(identity, differs))
        self.identity, self.asked = identity, request(config, stages)
        self.save()

    def _foreign(self, identity: dict[str, Any], differs: list[str]) -> str:
        was = " ".join(f"{part}={self.identity[part]['name']}" for part in differs)
        now = " ".join(f"{part}={identity[part]['name']}" for part in differs)
        return (
            f"{self.run_dir} belongs to another configuration: it was made with {was}, not {now}. "
            f"Choose another name=, or use the original configuration ({self.run_dir}/*/config.yaml)"
        )

    def decide(self, stage: str, consumed: dict[str, Any]) -> Decision:
        """Skip, resume or run a stage that would consume this now."""
        record = self.stages.get(stage)
        if record is None:
            return Decision("run")
        before = _as_known_now(record["consumed"], consumed)
        if before != consumed:
            return Decision("run", differences(before, consumed))
        if record["status"] != "finished":
            return Decision("resume")
        if self.finished(stage):
            return Decision("skip")
        if any((self.run_dir / stage / "checkpoints").glob("step-*[0-9]")):
            return Decision("resume", "its model is gone; it is exported again from the newest checkpoint")
        return Decision("run", "its model and its checkpoints are gone")

    def changes_tokenizer(self, stage: str, consumed: dict[str, Any]) -> bool:
        """True where what the run's tokenizer is made from (model, data, seed) is other than the stage had."""
        old = self.stages.get(stage, {}).get("consumed")
        if old is None:
            return False
        old = _as_known_now(old, consumed)
        made_from = [key for key in consumed["settings"] if key == "seed" or key.startswith(("model.", "data."))]
        changed = any(old["settings"].get(key) != consumed["settings"][key] for key in made_from)
        return changed or old["data"] != consumed["data"]


def stage_inputs(config: RunConfig, run_dir: Path, stage: str) -> dict[str, Path | None]:
    """The models a stage starts from, by role; None is the base model of the configuration.

    sft: {"base": None}; reward: {"base": None} or {"sft": folder}; dpo: {"actor": folder}; ppo the same and, with a
    reward model, {"reward": folder}.
    Launcher and worker both ask here. Raises UserError where a model is earlier.
    """
    manifest = Manifest.read(run_dir)
    if stage == "sft":
        return {"base": None}
    if stage == "reward":
        return _reward_input(config, manifest)
    earlier = partial(_earlier, manifest, stage.upper())
    found: dict[str, Path | None] = {"actor": earlier("sft", "actor", config.actor)}
    if stage == "ppo" and config.ppo.reward_model:
        found["reward"] = earlier("reward", "reward", config.reward_path)
    return found


def _reward_input(config: RunConfig, manifest: Manifest) -> dict[str, Path | None]:
    init = config.reward.init
    if init == "base" or (init == "auto" and config.reward_model is not None):
        return {"base": None}
    if config.actor is not None:
        return {"sft": model_folder(config.actor, "actor")}
    made = manifest.product("sft")
    if made is not None:
        return {"sft": made}
    if init == "sft":
        raise UserError(f"reward.init=sft, but {manifest.run_dir} has no finished sft stage: run stage=sft first")
    return {"base": None}


def _earlier(manifest: Manifest, wanted_by: str, stage: str, key: str, given: str | None) -> Path:
    if given is not None:
        return model_folder(given, key)
    made = manifest.product(stage)
    if made is not None:
        return made
    if not manifest.stages:
        raise UserError(
            f"{wanted_by} has no {key} model: a new run has no finished {stage} stage. Say which run has one (name=, "
            f"run_dir=), give {key}=FOLDER, or begin with the other stages ({TRAIN} stage=all)"
        )
    raise UserError(
        f"{wanted_by} has no {key} model: {manifest.run_dir} has no finished {stage} stage. "
        f"Run stage={stage} there first (or stage=all), or give {key}=FOLDER"
    )


def stage_consumes(config: RunConfig, run_dir: Path, stage: str, cache: HashCache) -> dict[str, Any]:
    """Everything a stage's result depends on: its settings, and data, models and the reward function by content."""
    base = config.reward_model if stage == "reward" and config.reward_model is not None else config.model
    models = {
        role: _as_made(folder, run_dir, cache) if folder is not None else model_content(base, cache)
        for role, folder in stage_inputs(config, run_dir, stage).items()
    }
    settings, data = stage_settings(config, stage), data_content(config.data, cache)
    found = {"config": digest(settings), "settings": settings, "data": data, "models": models}
    if stage == "ppo" and config.ppo.reward_function is not None:
        found["reward_function"] = cache.file(function_file(config.ppo.reward_function))
    return found


def _as_made(folder: Path, run_dir: Path, cache: HashCache) -> str:
    """The content hash of a model. Raises UserError where a stage of this run made it, and it is another one now."""
    found, stage = cache.tree(folder), folder.parent.name
    record = Manifest.read(run_dir).stages.get(stage, {}) if folder.parent.parent == run_dir else {}
    if record.get("produced", {}).get("model", found) != found:
        raise UserError(
            f"{folder} is not as the {stage} stage made it (damaged, or changed by hand). Put it back; or delete it, "
            f"and stage={stage} makes it again; or keep what you changed elsewhere, and start another run from there"
        )
    return found


def _as_known_now(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What was consumed, with the keys that came into being since at their defaults, which change no result, and
    without those that count no more: a finished stage stays finished when the program is brought up to date.
    """
    from pipeline.config.compose import defaults  # the launcher's alone: it imports Hydra

    usual = flat(defaults(RunConfig))
    since = {key: usual[key] for key in new["settings"] if key in usual and key not in old["settings"]}
    gone = {f"rollout.{key}" for key in HOW_ROLLOUTS} & old["settings"].keys()
    settings = {key: value for key, value in {**old["settings"], **since}.items() if key not in gone}
    return {**old, "settings": settings, "config": digest(settings)} if since or gone else old


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """In words, what a stage would consume otherwise than before: the first few keys with both values."""
    keys = [key for key in new["settings"] if old["settings"].get(key) != new["settings"][key]]
    found = [f"{key} was {old['settings'].get(key)}, is {new['settings'][key]}" for key in keys[:3]]
    found += [f"{len(keys) - 3} more keys"] if len(keys) > 3 else []
    found += ["the data changed"] if old["data"] != new["data"] else []
    functions = {old.get("reward_function"), new.get("reward_function")} - {None}
    found += ["the reward function's file changed"] if len(functions) == 2 else []
    roles = [role for role in new["models"] if old["models"].get(role) != new["models"][role]]
    found += [f"its {role} model changed" for role in roles]
    return "; ".join(found) or "its settings changed"


def run_identity(config: RunConfig) -> dict[str, Any]:
    """What a run folder is about: one model and one data set, with the names to show."""
    return {
        "model": {"name": config.model.name, "source": model_source(config.model)},
        "data": {"name": config.data.name, "source": data_source(config.data)},
    }


def request(config: RunConfig, stages: list[str]) -> str:
    """A hash of what a command asks for, to find an unfinished run of the same command."""
    from pipeline.config.compose import defaults  # the launcher's alone: it imports Hydra

    usual = flat(defaults(RunConfig))
    settings = {
        stage: {key: value for key, value in stage_settings(config, stage).items() if value != usual.get(key)}
        for stage in stages
    }  # the same command asks for the same when there are more keys
    return digest({"stages": settings, "actor": config.actor, "reward": config.reward_path})


def move_aside(folder: Path) -> Path:
    """Keep a stage folder under the next free name <stage>.1, .2, ...; returns where it is now."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
