"""Read and write manifest.json, which records the inputs and outputs of each stage, and decide which stages must run.

- A finished stage with unchanged inputs is skipped.
- An unfinished stage with unchanged inputs resumes.
- A stage with changed inputs runs again. Its old folder is renamed to <stage>.1, <stage>.2, ...

The inputs of a stage include the hashes of the models of earlier stages. A change of one stage therefore also runs the
later stages again. Only the first launcher writes this file.
"""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pipeline.config.environment import model_folder
from pipeline.config.schema import RunConfig
from pipeline.config.stages import POLICIES
from pipeline.errors import UserError
from pipeline.evaluation.user_function import function_file
from pipeline.files import write_whole
from pipeline.installation import TRAIN
from pipeline.launch.fingerprint import (
    ROLLOUT_EXECUTION_KEYS,
    HashCache,
    data_content,
    data_source,
    digest,
    flatten,
    model_content,
    model_source,
    stage_settings,
)

Action = Literal["skip", "resume", "run"]


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
        content = {"identity": self.identity, "asked": self.request, "stages": self.stages}
        write_whole(self.run_dir / "manifest.json", json.dumps(content, indent=2) + "\n")

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

    def begin(self, stage: str, consumed: dict[str, Any]) -> None:
        """Record that a stage runs with these inputs. The start time of a resumed stage does not change."""
        record = self.stages.get(stage, {})
        is_resumed = bool(record) and _migrate(record["consumed"], consumed) == consumed
        started = record["started"] if is_resumed else _now()
        self.stages[stage] = {"status": "running", "consumed": consumed, "produced": {}, "started": started}
        self.save()

    def stop(self, stage: str) -> None:
        """Record that a stage was interrupted or failed. The next start resumes the stage."""
        self.stages[stage]["status"] = "stopped"
        self.save()

    def finish(self, stage: str, cache: HashCache) -> None:
        """Record that a stage has finished, with the content hash of its model."""
        produced = {"model": cache.tree(self.run_dir / stage / "model")}
        self.stages[stage].update(status="finished", produced=produced, finished=_now())
        self.save()

    def claim(self, config: RunConfig, stages: list[str]) -> None:
        """Record the identity and the request of this run. Raise UserError if the folder has another model or data."""
        identity = run_identity(config)
        if self.identity and self.stages:
            changed = [kind for kind in ("model", "data") if self.identity[kind]["source"] != identity[kind]["source"]]
            if changed:
                raise UserError(self._describe_conflict(identity, changed))
        self.identity, self.request = identity, hash_request(config, stages)
        self.save()

    def _describe_conflict(self, identity: dict[str, Any], changed: list[str]) -> str:
        old = " ".join(f"{kind}={self.identity[kind]['name']}" for kind in changed)
        new = " ".join(f"{kind}={identity[kind]['name']}" for kind in changed)
        return (
            f"{self.run_dir} belongs to another configuration: it was made with {old}, not {new}. "
            f"Choose another name=, or use the original configuration ({self.run_dir}/*/config.yaml)"
        )

    def decide(self, stage: str, consumed: dict[str, Any]) -> Decision:
        """Decide whether to skip, resume or run a stage whose inputs are now `consumed`."""
        record = self.stages.get(stage)
        if record is None:
            return Decision("run")
        recorded = _migrate(record["consumed"], consumed)
        if recorded != consumed:
            return Decision("run", differences(recorded, consumed))
        if record["status"] != "finished":
            return Decision("resume")
        if self.finished(stage):
            return Decision("skip")
        if any((self.run_dir / stage / "checkpoints").glob("step-*[0-9]")):
            return Decision("resume", "its model is gone; it is exported again from the newest checkpoint")
        return Decision("run", "its model and its checkpoints are gone")

    def changes_tokenizer(self, stage: str, consumed: dict[str, Any]) -> bool:
        """Return whether the inputs of the run's tokenizer (model, data, seed) have changed since the stage ran."""
        old = self.stages.get(stage, {}).get("consumed")
        if old is None:
            return False
        old = _migrate(old, consumed)
        keys = [key for key in consumed["settings"] if key == "seed" or key.startswith(("model.", "data."))]
        settings_changed = any(old["settings"].get(key) != consumed["settings"][key] for key in keys)
        return settings_changed or old["data"] != consumed["data"]


def stage_inputs(config: RunConfig, run_dir: Path, stage: str) -> dict[str, Path | None]:
    """Return the models that a stage starts from, by role. None means the base model of the configuration.

    sft: {"base": None}
    reward: {"base": None} or {"sft": folder}
    dpo: {"actor": folder}
    ppo: {"actor": folder}, and {"reward": folder, "reward_2": folder, ...} if it uses reward models

    Raise UserError if the model of an earlier stage is missing.
    """
    manifest = Manifest.read(run_dir)
    if stage == "sft":
        return {"base": None}
    if stage == "reward":
        return _reward_input(config, manifest)
    find_model = partial(_find_earlier_model, manifest, stage.upper())
    inputs: dict[str, Path | None] = {"actor": find_model("sft", "actor", config.actor)}
    if stage == "ppo" and config.ppo.reward_model:
        inputs["reward"] = find_model("reward", "reward", config.reward_path)
        for number, folder in enumerate(config.ppo.reward_ensemble, 2):
            inputs[f"reward_{number}"] = model_folder(folder, "ppo.reward_ensemble")
    return inputs


def _reward_input(config: RunConfig, manifest: Manifest) -> dict[str, Path | None]:
    init = config.reward.init
    if init == "base" or (init == "auto" and config.reward_model is not None):
        return {"base": None}
    if config.actor is not None:
        return {"sft": model_folder(config.actor, "actor")}
    sft_model = manifest.product("sft")
    if sft_model is not None:
        return {"sft": sft_model}
    if init == "sft":
        raise UserError(f"reward.init=sft, but {manifest.run_dir} has no finished sft stage: run stage=sft first")
    return {"base": None}


def _find_earlier_model(manifest: Manifest, consumer: str, stage: str, key: str, configured: str | None) -> Path:
    """Return the folder that the key `key` names, else the model of an earlier stage. Raise UserError if neither."""
    if configured is not None:
        return model_folder(configured, key)
    model = manifest.product(stage)
    if model is not None:
        return model
    if not manifest.stages:
        raise UserError(
            f"{consumer} has no {key} model: a new run has no finished {stage} stage. Select a run that has one "
            f"(name=, run_dir=), set {key}=FOLDER, or run the earlier stages too ({TRAIN} stage=all)"
        )
    raise UserError(
        f"{consumer} has no {key} model: {manifest.run_dir} has no finished {stage} stage. "
        f"Run stage={stage} (or stage=all) with the same run folder first, or set {key}=FOLDER"
    )


def stage_consumes(config: RunConfig, run_dir: Path, stage: str, cache: HashCache) -> dict[str, Any]:
    """Return everything that a stage's result depends on.

    These are its settings and the content hashes of its data, its models and its reward function.
    """
    base = config.reward_model if stage == "reward" and config.reward_model is not None else config.model
    models = {
        role: _hash_unchanged(folder, run_dir, cache) if folder is not None else model_content(base, cache)
        for role, folder in stage_inputs(config, run_dir, stage).items()
    }
    settings, data = stage_settings(config, stage), data_content(config.data, cache)
    inputs = {"config": digest(settings), "settings": settings, "data": data, "models": models}
    if stage == "ppo" and config.ppo.reward_function is not None:
        inputs["reward_function"] = cache.file(function_file(config.ppo.reward_function))
    return inputs


def _hash_unchanged(folder: Path, run_dir: Path, cache: HashCache) -> str:
    """Return the content hash of a model. Raise UserError if a stage of this run made it and it changed since then."""
    current, stage = cache.tree(folder), folder.parent.name
    record = Manifest.read(run_dir).stages.get(stage, {}) if folder.parent.parent == run_dir else {}
    if record.get("produced", {}).get("model", current) != current:
        raise UserError(
            f"{folder} is not as the {stage} stage made it: it is damaged or was edited. Restore it; or delete it and "
            f"run stage={stage} to export it again; or copy the edited model to another folder and start a new run "
            "from that folder"
        )
    return current


def _migrate(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return recorded inputs in the form of the current version, so that an update does not run stages again.

    Keys that are newer than the record get their defaults, which change no result. Keys that no longer count are
    removed.
    """
    from pipeline.config.compose import defaults  # imports Hydra, which workers do not need

    default_settings = flatten(defaults(RunConfig))
    added = {
        key: default_settings[key] for key in new["settings"] if key in default_settings and key not in old["settings"]
    }
    removed = {f"rollout.{key}" for key in ROLLOUT_EXECUTION_KEYS} & old["settings"].keys()
    settings = {key: value for key, value in {**old["settings"], **added}.items() if key not in removed}
    return {**old, "settings": settings, "config": digest(settings)} if added or removed else old


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describe how the inputs of a stage have changed. At most three keys are listed with both values."""
    keys = [key for key in new["settings"] if old["settings"].get(key) != new["settings"][key]]
    changes = [f"{key} was {old['settings'].get(key)}, is {new['settings'][key]}" for key in keys[:3]]
    changes += [f"{len(keys) - 3} more keys"] if len(keys) > 3 else []
    changes += ["the data changed"] if old["data"] != new["data"] else []
    functions = {old.get("reward_function"), new.get("reward_function")} - {None}
    changes += ["the reward function's file changed"] if len(functions) == 2 else []
    roles = [role for role in new["models"] if old["models"].get(role) != new["models"][role]]
    changes += [f"its {role} model changed" for role in roles]
    return "; ".join(changes) or "its settings changed"


def run_identity(config: RunConfig) -> dict[str, Any]:
    """Return the model and the data set that a run folder belongs to, with their names and sources."""
    return {
        "model": {"name": config.model.name, "source": model_source(config.model)},
        "data": {"name": config.data.name, "source": data_source(config.data)},
    }


def hash_request(config: RunConfig, stages: list[str]) -> str:
    """Return a hash of the stages and settings of a command, to find an unfinished run of the same command.

    Settings at their defaults are left out, so that a new key of a later version does not change the hash.
    """
    from pipeline.config.compose import defaults  # imports Hydra, which workers do not need

    default_settings = flatten(defaults(RunConfig))
    settings = {
        stage: {
            key: value for key, value in stage_settings(config, stage).items() if value != default_settings.get(key)
        }
        for stage in stages
    }
    return digest({"stages": settings, "actor": config.actor, "reward": config.reward_path})


def move_aside(folder: Path) -> Path:
    """Rename a stage folder to the first free name of <stage>.1, <stage>.2, ... Return the new path."""
    number = 1
    while (path := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
