"""Find the models that a stage starts from, and hash everything that its result depends on."""

from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.schema import RunConfig
from pipeline.errors import UserError
from pipeline.evaluation.user_function import JUDGE, PAIR_JUDGE, function_file
from pipeline.installation import TRAIN
from pipeline.launch.fingerprint import (
    data_content,
    digest,
    file_contents,
    hash_file,
    hash_tree,
    model_content,
    stage_settings,
    tokenizer_content,
)
from pipeline.launch.manifest import Manifest
from pipeline.models.folder import model_folder


def stage_inputs(config: RunConfig, manifest: Manifest, stage: str) -> dict[str, Path | None]:
    """Return the models that a stage starts from, by role. None means the base model of the configuration.

    sft: {"base": None}
    reward: {"base": None} or {"sft": folder}
    dpo: {"actor": folder}
    ppo: {"actor": folder}, and {"reward": folder, "reward_2": folder, ...} if it uses reward models, or
        {"teacher": folder} if it uses a teacher

    Raise UserError if the model of an earlier stage is missing.
    """
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
    if stage == "ppo" and config.teacher is not None:
        inputs["teacher"] = model_folder(config.teacher, "teacher")
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
    unrecorded = manifest.run_dir / "sft" / "model"
    if "sft" not in manifest.stages and unrecorded.exists():
        raise UserError(
            f"{unrecorded} exists, but {manifest.run_dir / 'manifest.json'} has no record of the sft stage, so its "
            "inputs are unknown: restore manifest.json, run stage=all (SFT runs again), or set reward.init=base to "
            "start from the base model"
        )
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
    raise UserError(
        f"{consumer} has no {key} model: {manifest.run_dir} has no finished {stage} stage. Select a run that has one "
        f"(name=, run_dir=), set {key}=FOLDER, or run the earlier stages too ({TRAIN} stage=all)"
    )


def stage_consumes(config: RunConfig, manifest: Manifest, stage: str) -> dict[str, Any]:
    """Return everything that a stage's result depends on.

    These are its settings and the content hashes of its data, its models and its reward function.
    """
    base = config.reward_model if stage == "reward" and config.reward_model is not None else config.model
    models = {
        role: _hash_unchanged(folder, manifest) if folder is not None else model_content(base)
        for role, folder in stage_inputs(config, manifest, stage).items()
    }
    settings, data = stage_settings(config, stage), data_content(config.data)
    inputs: dict[str, Any] = {"config": digest(settings), "settings": settings, "data": data, "models": models}
    inputs["files"] = file_contents(config.data)  # their order is no part of `data`
    if "base" in models and config.actor is None:
        inputs["tokenizer"] = tokenizer_content(config.model)
    if stage == "ppo" and config.ppo.reward_function is not None:
        inputs["reward_function"] = hash_file(function_file(config.ppo.reward_function))
    if settings.get("evaluation.judge") is not None:  # the guard or export=best reads its grades
        inputs["judge"] = judge_files(config)[JUDGE]
    return inputs


def judge_files(config: RunConfig) -> dict[str, str]:
    """Return the content hashes of the files of `evaluation.judge` and `evaluation.pair_judge`, by key, if set."""
    judges = {JUDGE: config.evaluation.judge, PAIR_JUDGE: config.evaluation.pair_judge}
    return {key: hash_file(function_file(where, key)) for key, where in judges.items() if where is not None}


def _hash_unchanged(folder: Path, manifest: Manifest) -> str:
    """Return the content hash of a model. Raise UserError if a stage of this run made it and it changed since then."""
    current, stage = hash_tree(folder), folder.parent.name
    record = manifest.stages.get(stage, {}) if folder.parent.parent == manifest.run_dir else {}
    if record.get("produced", {}).get("model", current) != current:
        raise UserError(
            f"{folder} is not as the {stage} stage made it: it is damaged or was edited. Restore it; or delete it and "
            f"run stage={stage} to export it again; or copy the edited model to another folder and start a new run "
            "from that folder"
        )
    return current
