"""Validate a composed configuration: turn a dictionary into a `RunConfig`, or raise an error with advice.

Every mistake that can be detected without loading a model or data is reported here, before any work.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from pipeline.config.check_engine import engine_mistakes
from pipeline.config.check_ppo import ppo_mistakes
from pipeline.config.messages import messages
from pipeline.config.needs import unmet_needs
from pipeline.config.schema import DataConfig, ModelConfig, RolloutSection, RunConfig
from pipeline.config.stages import METHODS, POLICIES, STAGES, stages_to_run
from pipeline.errors import UserError


def validate(raw: Mapping[str, Any]) -> RunConfig:
    """Check types, bounds and combinations of keys. Raises UserError with one line for each mistake."""
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as problem:
        raise UserError("\n".join(messages(problem, RunConfig))) from None
    mistakes = [*_mistakes(config), *engine_mistakes(config)]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return config


def _mistakes(config: RunConfig) -> Iterable[str]:
    """Yield one message for each combination of keys outside of `engine` that is not supported."""
    yield from _model_mistakes("model", config.model)
    if config.reward_model is not None:
        yield from _model_mistakes("reward_model", config.reward_model)
    yield from _data_mistakes(config.data)
    if "name" in config.model_fields_set and config.name is not None and not _is_folder_name(config.name):
        yield f"name={config.name}: a run name has letters, digits and . _ - = , only (run_dir= takes a path)"
    stages = stages_to_run(config)
    if config.method != "ppo" and config.stage not in ("all", "plan", *METHODS[config.method]):
        names = " and ".join(METHODS[config.method])
        yield f"method={config.method} has the stages {names}, but stage={config.stage}: remove one of the two"
    yield from _start_mistakes(config, stages)
    if config.plan.device is not None and config.ranks is not None:
        yield (
            f"ranks={config.ranks} starts processes on this machine, but plan.device={config.plan.device} plans for "
            f"another one: write plan.ranks={config.ranks} instead"
        )
    if config.rollout.min_new_tokens > config.rollout.max_new_tokens:
        yield (
            f"rollout.min_new_tokens={config.rollout.min_new_tokens} exceeds "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: lower rollout.min_new_tokens"
        )
    if "ppo" in stages:
        yield from ppo_mistakes(config)
    yield from unmet_needs(config, stages)
    if "reward" in stages and config.reward.init == "sft" and config.reward_model is not None:
        yield (
            "reward.init=sft starts the reward model from the SFT model, but reward_model= selects another model: "
            "remove one of the two"
        )


def _start_mistakes(config: RunConfig, stages: Sequence[str]) -> Iterable[str]:
    """Yield messages about start models (`actor`, `reward`) that no stage of the run uses."""
    for key, shown, users in (("actor", "actor", POLICIES[::-1]), ("reward_path", "reward", ("ppo",))):
        plans_sft = config.stage == "plan" and config.engine.pipeline_parallel > 1
        if getattr(config, key) is None or set(users) & set(stages) or plans_sft:
            continue
        selected = f"stage={config.stage}" if config.stage in STAGES else f"method={config.method}"
        names = " or ".join(stage.upper() for stage in users)
        yield (
            f"{shown}={getattr(config, key)} selects the model that {names} starts from, but {selected}: remove "
            f"{shown}=, or set stage={users[0]} (other stages start from model.path=FOLDER)"
        )


def _is_folder_name(name: str) -> bool:
    return bool(name) and name.strip(".") != "" and all(c.isalnum() or c in "._-=,+" for c in name)


def _model_mistakes(key: str, model: ModelConfig) -> Iterable[str]:
    if model.weights == "pretrained" and not (model.path or model.hub):
        yield (
            f"{key} has no weights to load: set {key}.path=FOLDER, {key}.hub=ORGANISATION/NAME or {key}.weights=random"
        )
    if model.weights == "random" and not model.architecture:
        architecture = f"{key}.architecture={{model_type: ..., ...}}"
        yield f"{key}.weights=random needs an architecture: set {architecture}, or choose an option of conf/model"
    if model.architecture and "model_type" not in model.architecture:
        yield (
            f"{key}.architecture.model_type is missing: set the family's name in transformers (opt, llama, qwen3, "
            f"...). {key}.architecture.KEY=VALUE changes one field of an option's architecture"
        )


def _data_mistakes(data: DataConfig) -> Iterable[str]:
    if not data.path and not data.sources:
        yield "data has no source: set data.path=FILE, or choose an option of conf/data"
    for number, source in enumerate(data.sources):
        kinds = [name for name in ("path", "hub", "builtin") if getattr(source, name)]
        if not kinds:
            yield f"data.sources.{number} has no data: set its path, hub or builtin key"
        if source.eval_path and not source.path:
            instead = "use eval_split=NAME for a data set of the hub" if source.hub else "set path=FILE"
            yield (
                f"data.sources.{number}.eval_path={source.eval_path} needs the path key: {instead}, or remove eval_path"
            )
        if source.eval_split and not source.hub:
            yield (
                f"data.sources.{number}.eval_split={source.eval_split} is a split of a data set of the hub: set "
                "eval_path=FILE for local data, or remove eval_split"
            )
    shares = data.stage_shares
    if not shares or min(shares.values()) < 0 or sum(shares.values()) <= 0:
        yield f"data.stage_shares={shares}: every share must be 0 or more, and at least one above 0"


RESHAPING = ("top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens")
"""The keys of `rollout` that change the distribution of the sampled tokens. Their defaults do not."""


def warnings(config: RunConfig) -> list[str]:
    """Return a message for each setting that is allowed but probably a mistake."""
    found = []
    plain = {key: getattr(RolloutSection(), key) for key in RESHAPING}
    changed = [f"rollout.{key}={value:g}" for key in RESHAPING if (value := getattr(config.rollout, key)) != plain[key]]
    if "ppo" in stages_to_run(config) and changed:
        found.append(
            f"{' '.join(changed)}: PPO samples from a changed distribution but trains the full one, so its ratios are "
            f"biased: set {' '.join(f'rollout.{key}={value:g}' for key, value in plain.items())}"
        )
    if "ppo" in stages_to_run(config) and config.reward_model is not None and not config.ppo.reward_model:
        found.append(f"reward_model={config.reward_model.name} is not used, because ppo.reward_model=false")
    if config.method == "dpo" and config.reward_model is not None:
        found.append(f"reward_model={config.reward_model.name} is not used, because method=dpo has no reward model")
    if config.engine.deepspeed is not None:
        from engine import deepspeed_json

        found += [f"engine.deepspeed: {line}" for line in deepspeed_json.ignored(config.engine.deepspeed)]
        found += _other_batches(config, config.engine.deepspeed)
    return found


def _other_batches(config: RunConfig, file: Mapping[str, Any]) -> Iterable[str]:
    """Yield messages about stages whose batch size differs from that of a DeepSpeed file."""
    file_size = file.get("train_batch_size")
    for stage in stages_to_run(config):
        size = getattr(config, stage).batch_size
        if isinstance(file_size, int) and file_size != size:
            yield (
                f"engine.deepspeed: train_batch_size={file_size} of the file is not used, {stage}.batch_size={size} "
                f"is: set {stage}.batch_size={file_size} to use the file's value"
            )
