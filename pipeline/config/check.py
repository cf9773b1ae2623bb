"""The edge: a composed dictionary becomes a `RunConfig`, or one clear message says what to write instead.

Everything that can be refused without loading a model or data is refused here, before any work.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.config.overrides import closest
from pipeline.config.schema import (
    ROLE_ENGINES,
    DataConfig,
    EngineSettings,
    ModelConfig,
    RunConfig,
    inner_section,
)
from pipeline.errors import UserError

STAGES = ("sft", "reward", "ppo")


def validate(raw: Mapping[str, Any]) -> RunConfig:
    """Types, bounds and pairs that can't go together. Raises UserError with one line for each mistake."""
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as problem:
        raise UserError("\n".join(_messages(problem, RunConfig))) from None
    mistakes = [*_pair_mistakes(config), *_engine_mistakes(config)]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return config


def wanted_stages(config: RunConfig) -> list[str]:
    """The stages to run, in order. `actor` and `reward_path` stand in for the stages that would make them."""
    if config.stage not in ("all", "plan"):
        return [config.stage]
    given = {"sft": config.actor, "reward": config.reward_path}
    return [stage for stage in STAGES if given.get(stage) is None]


# Messages of single keys


def _messages(problem: ValidationError, root: type[BaseModel]) -> list[str]:
    lines: dict[str, str] = {}
    for error in problem.errors():
        key = ".".join(part for part in map(str, error["loc"]) if part not in ("str", "list[str]", "[key]"))
        lines.setdefault(key, _message(key, error, root))
    return list(lines.values())


def _message(key: str, error: ErrorDetails, root: type[BaseModel]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    shown = _shown(error["input"])
    if kind == "extra_forbidden":
        return f"{key}: there is no such key{_instead(key, root)}"
    if kind == "missing":
        return f"{key} is missing{_about(key, root)}"
    if kind == "literal_error":
        return f"{key}={shown}: write {context['expected'].replace(chr(39), '')}"
    bounds = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
    if kind in bounds:
        limit = next(iter(context.values()))
        return f"{key}={shown}: must be {bounds[kind]} {limit:g}{_about(key, root)}"
    if kind.startswith(("int_", "float_", "bool_", "string_", "dict_", "list_", "model_")):
        wanted = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "string": "text",
            "dict": "{key: value, ...}",
            "list": "[a, b, ...]",
            "model": "keys below it, as in " + key + ".KEY=VALUE",
        }[kind.split("_")[0]]
        return f"{key}={shown}: write {wanted}{_about(key, root)}"
    return f"{key}={shown}: {error['msg']}"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if len(str(value)) <= 60 else str(value)[:57] + "..."


def _about(key: str, root: type[BaseModel]) -> str:
    description = describe(root).get(key)
    return f" ({description})" if description else ""


def _instead(key: str, root: type[BaseModel]) -> str:
    """What was probably meant: a like-named key beside it, else the same last part elsewhere, else nothing."""
    known = describe(root)
    parent, _, leaf = key.rpartition(".")
    beside = {name.removeprefix(f"{parent}." if parent else ""): name for name in known if _parent(name) == parent}
    near = closest(leaf, beside)
    if near:
        return f"; did you mean {beside[near]}?"
    same = [name for name in known if name.rsplit(".", 1)[-1] == leaf and name.count(".") == 1]
    if same:
        return f"; did you mean {', '.join(same[:-1]) + ' or ' if same[1:] else ''}{same[-1]}?"
    anywhere = closest(key, known)
    if anywhere:
        return f"; did you mean {anywhere}?"
    return f"; {parent} has {', '.join(beside)}" if beside and parent else " (docs/configuration.md lists all)"


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def describe(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Every dotted key of the schema with what it means. Sections have the empty text."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        found[key] = field.description or ""
        inner = inner_section(field.annotation)
        if inner is not None:
            found.update(describe(inner, f"{key}."))
    return found


# Pairs that can't go together


def _pair_mistakes(config: RunConfig) -> Iterable[str]:
    yield from _model_mistakes("model", config.model)
    if config.reward_model is not None:
        yield from _model_mistakes("reward_model", config.reward_model)
    yield from _data_mistakes(config.data)
    if "name" in config.model_fields_set and config.name is not None and not _is_folder_name(config.name):
        yield f"name={config.name}: a run name has letters, digits and . _ - = , only (run_dir= takes a path)"
    for key in ("actor", "reward_path"):
        if getattr(config, key) is not None and config.stage not in ("all", "ppo", "plan"):
            shown = "reward" if key == "reward_path" else key
            where = f"{shown}={getattr(config, key)}"
            yield f"{where} is where PPO starts, but stage={config.stage}: leave it out, or stage=ppo"
    if config.rollout.min_new_tokens > config.rollout.max_new_tokens:
        yield (
            f"rollout.min_new_tokens={config.rollout.min_new_tokens} exceeds "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: lower it"
        )
    stages = wanted_stages(config)
    if "ppo" in stages:
        yield from _ppo_mistakes(config)
    if "reward" in stages and config.reward.init == "sft" and config.reward_model is not None:
        yield "reward.init=sft starts from the SFT model, reward_model= from another one: leave one of them out"


def _is_folder_name(name: str) -> bool:
    return bool(name) and name.strip(".") != "" and all(c.isalnum() or c in "._-=,+" for c in name)


def _model_mistakes(key: str, model: ModelConfig) -> Iterable[str]:
    if model.weights == "pretrained" and not (model.path or model.hub):
        yield f"{key} has no weights to load: {key}.path=FOLDER, {key}.hub=ORGANISATION/NAME, or {key}.weights=random"
    if model.weights == "random" and not model.architecture:
        shape = f"{key}.architecture={{model_type: ..., ...}}"
        yield f"{key}.weights=random has nothing to build: {shape}, or an option of conf/model"
    if model.architecture is not None and "model_type" not in model.architecture:
        yield f"{key}.architecture.model_type is missing: the family in transformers' words (opt, llama, qwen3, ...)"


def _data_mistakes(data: DataConfig) -> Iterable[str]:
    if not data.path and not data.sources:
        yield "data has nothing to read: data.path=FILE, or an option of conf/data"
    for number, source in enumerate(data.sources):
        kinds = [name for name in ("path", "hub", "builtin") if getattr(source, name)]
        if not kinds:
            yield f"data.sources.{number} has nothing to read: give it a path, a hub id or builtin: demo"
    shares = data.stage_shares
    if not shares or min(shares.values()) < 0 or sum(shares.values()) <= 0:
        yield f"data.stage_shares={shares}: shares must be 0 or more, and one of them more than 0"


def _ppo_mistakes(config: RunConfig) -> Iterable[str]:
    ppo = config.ppo
    if ppo.lora.dropout > 0:
        yield (
            f"ppo.lora.dropout={ppo.lora.dropout:g}: PPO needs the same probabilities when it samples and when it "
            "trains; ppo.lora.dropout=0"
        )
    needed = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > ppo.max_length:
        yield (
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {needed} exceed ppo.max_length={ppo.max_length}: "
            f"ppo.max_length={needed}, or shorter ones"
        )
    if ppo.batch_size % ppo.minibatches:
        yield _indivisible("ppo.batch_size", ppo.batch_size, ppo.minibatches, f"ppo.minibatches={ppo.minibatches}")


def engine_settings(engine: EngineSettings, own: Mapping[str, Any]) -> EngineSettings:
    """The engine of one of PPO's models: the run's, changed by the keys of its own."""
    return EngineSettings.model_validate({**engine.model_dump(), **own})


def _engine_mistakes(config: RunConfig) -> Iterable[str]:
    for name in ROLE_ENGINES:
        try:
            engine_settings(config.engine, getattr(config.ppo, name))
        except ValidationError as problem:
            for line in _messages(problem, EngineSettings):
                yield f"ppo.{name}.{line}"
        if "tensor_parallel" in getattr(config.ppo, name):
            yield f"ppo.{name}.tensor_parallel: the models of PPO are split alike; set engine.tensor_parallel"
    yield from _offload_mistakes("engine", config.engine)
    yield from _number_mistakes("engine", config.engine)
    yield from _deepspeed_mistakes(config.engine)


def _offload_mistakes(key: str, settings: EngineSettings) -> Iterable[str]:
    if settings.offload_parameters == "nvme" and settings.zero_stage != 3 and settings.deepspeed is None:
        yield f"{key}.offload_parameters=nvme needs {key}.zero_stage=3, not {settings.zero_stage}: engine=zero3-nvme"
    if settings.offload_parameters == "nvme" and settings.offload_optimizer == "none" and settings.deepspeed is None:
        yield f"{key}.offload_parameters=nvme needs {key}.offload_optimizer=nvme or cpu: engine=zero3-nvme"
    if settings.nvme_path is not None and not Path(settings.nvme_path).is_dir():
        yield f"{key}.nvme_path={settings.nvme_path}: there is no such folder"


def _number_mistakes(key: str, settings: EngineSettings) -> Iterable[str]:
    """Precisions, kept and sent, that don't go with the layout."""
    if settings.compress != "none" and settings.zero_stage == 0 and settings.deepspeed is None:
        yield f"{key}.compress={settings.compress} needs shards: engine=zero1, zero2 or zero3"
    if settings.states == "bf16" and settings.deepspeed is None:
        if settings.dtype != "bf16":
            yield f"{key}.states=bf16 needs {key}.dtype=bf16, not {settings.dtype}"
        if settings.offload_optimizer != "none" or settings.tensor_parallel > 1:
            yield f"{key}.states=bf16 needs {key}.offload_optimizer=none and {key}.tensor_parallel=1"


def _deepspeed_mistakes(settings: EngineSettings) -> Iterable[str]:
    """A file and our keys that say two different things."""
    if settings.deepspeed is None:
        return
    from engine import EngineConfig
    from engine.deepspeed import read

    keys = ("zero_stage", "dtype", "offload_optimizer", "offload_parameters", "nvme_path")
    own: dict[str, Any] = {key: getattr(settings, key) for key in keys}
    said = {key: value for key, value in own.items() if value != EngineSettings.model_fields[key].default}
    file = {key: value for key, value in settings.deepspeed.items() if key not in ("optimizer", "scheduler")}
    theirs = read(file, ranks=None, base=EngineConfig(**said)).engine
    for key, value in said.items():
        if getattr(theirs, key) != value:
            yield (
                f"engine.{key}={value}, but engine.deepspeed says {getattr(theirs, key)}: leave engine.{key} out, "
                'or change the file ("auto" leaves it to engine.*)'
            )


# What depends on the machine


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Batches must divide over the ranks (tensor groups). Raises UserError with the sizes that do."""
    tensor = config.engine.tensor_parallel
    if ranks % tensor:
        raise UserError(f"engine.tensor_parallel={tensor} does not divide the {ranks} ranks")
    shares, mistakes = ranks // tensor, []
    copies = config.engine.shard_ranks
    if copies is not None and config.engine.zero_stage > 0 and shares % copies:
        raise UserError(f"engine.shard_ranks={copies} does not divide the {shares} ranks (or tensor groups)")
    for stage in wanted_stages(config):
        size = getattr(config, stage).batch_size
        parts = shares * (config.ppo.minibatches if stage == "ppo" else 1)
        if size % parts:
            over = f"{shares} {'ranks' if tensor == 1 else 'tensor groups'}"
            over += f" x ppo.minibatches={config.ppo.minibatches}" if parts != shares else ""
            mistakes.append(_indivisible(f"{stage}.batch_size", size, parts, over))
    if mistakes:
        raise UserError("\n".join(mistakes))


def _indivisible(key: str, size: int, parts: int, over: str) -> str:
    lower, upper = size // parts * parts, (size // parts + 1) * parts
    choices = f"{key}={lower} or {upper}" if lower else f"{key}={upper}"
    return f"{key}={size} does not divide over {over}: {choices}"


def check_paths(config: RunConfig) -> None:
    """Files and folders that the configuration names have to be there. Raises UserError."""
    for key, given in (("actor", config.actor), ("reward", config.reward_path)):  # a model path may be made from them
        if given is not None:
            model_folder(given, key)
    for key, model in (("model", config.model), ("reward_model", config.reward_model)):
        if model is None:
            continue
        if model.path is not None:
            model_folder(model.path, f"{key}.path")
        if model.chat_template is not None and not Path(model.chat_template).is_file():
            raise UserError(f"{key}.chat_template={model.chat_template}: there is no such file")
    location = config.data.path
    if location is not None and not Path(location).exists():
        raise UserError(f"data.path={location}: there is no such file or folder (looked from {Path.cwd()})")


def model_folder(location: str, key: str) -> Path:
    """The Hugging Face folder that a path means: itself, or `model` in it (a stage folder). Raises UserError."""
    folder = Path(location).expanduser()
    for place in (folder, folder / "model"):
        if (place / "config.json").is_file():
            return place
    if not folder.is_dir():
        raise UserError(f"{key}={location}: there is no such folder (looked from {Path.cwd()})")
    stages = [stage for stage in ("ppo", "sft", "reward") if (folder / stage / "model" / "config.json").is_file()]
    if stages:
        raise UserError(f"{key}={location} is a run folder; name one of its stages: {key}={folder / stages[0]}")
    if any((folder / name).is_dir() for name in ("checkpoints", "model")):
        raise UserError(f"{key}={location} is a stage that has not finished: finish it first (the same command again)")
    raise UserError(f"{key}={location} is no model folder: it has no config.json (Hugging Face format, safetensors)")


PLAIN_SAMPLING = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "min_new_tokens": 0}


def warnings(config: RunConfig) -> list[str]:
    """What is allowed and probably not meant."""
    found = []
    changed = [f"rollout.{key}={getattr(config.rollout, key):g}" for key, plain in PLAIN_SAMPLING.items()
               if getattr(config.rollout, key) != plain]  # fmt: skip
    if "ppo" in wanted_stages(config) and changed:
        found.append(
            f"{' '.join(changed)}: PPO samples from a cut distribution and trains the whole one; "
            f"{' '.join(f'rollout.{key}={plain}' for key, plain in PLAIN_SAMPLING.items())} is what its ratios assume"
        )
    if config.engine.deepspeed is not None:
        from engine.deepspeed import notes

        found += [f"engine.deepspeed: {line}" for line in notes(config.engine.deepspeed)]
        found += _other_batches(config, config.engine.deepspeed)
    return found


def _other_batches(config: RunConfig, file: Mapping[str, Any]) -> Iterable[str]:
    """A DeepSpeed file's batch where a stage takes another."""
    said = file.get("train_batch_size")
    for stage in wanted_stages(config):
        size = getattr(config, stage).batch_size
        if isinstance(said, int) and said != size:
            yield (
                f"engine.deepspeed: its train_batch_size={said} is not what {stage} takes a step, {size}; "
                f"{stage}.batch_size={said} if you mean the file's"
            )
