"""What a configuration asks of where it runs: ranks that its batches divide over, files and folders that are there."""

from collections.abc import Iterator, Set
from pathlib import Path

from pipeline.config.engines import copies
from pipeline.config.messages import indivisible, no_divisor
from pipeline.config.schema import DataConfig, RunConfig
from pipeline.config.stages import ANSWERING, STAGES, wanted_stages
from pipeline.data.files import find, missing
from pipeline.data.sources import is_absent, is_remote
from pipeline.errors import UserError
from pipeline.evaluation.user_function import JUDGE, load_function


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Batches must divide over the ranks (groups, pipelines). Raises UserError with the sizes that do."""
    kinds = {
        "tensor_parallel": "tensor groups",
        "pipeline_parallel": "pipelines",
        "sequence_parallel": "sequence groups",
    }
    group, shares, mistakes = "ranks", ranks, []
    for key, kind in kinds.items():
        size = getattr(config.engine, key)
        if ranks % size:
            raise UserError(no_divisor(f"engine.{key}", size, ranks, f"{ranks} ranks"))
        group, shares = (kind, shares // size) if size > 1 else (group, shares)
    if ranks % config.rollout.tensor_parallel and set(ANSWERING) & set(wanted_stages(config)):
        raise UserError(no_divisor("rollout.tensor_parallel", config.rollout.tensor_parallel, ranks, f"{ranks} ranks"))
    pieces, sequence = config.engine.pipeline_parallel, config.engine.sequence_parallel
    for key, together in copies(config):
        if shares * sequence % together:
            over = f"{shares} {group}" if sequence == 1 else f"{ranks} ranks"
            raise UserError(no_divisor(f"{key}.shard_ranks", together, shares * sequence, over))
    for stage in wanted_stages(config) if pieces == 1 else ("sft",):
        size = getattr(config, stage).batch_size
        parts = shares * (config.ppo.minibatches if stage == "ppo" else 1)
        if size * (config.ppo.samples if stage == "ppo" else 1) % parts:
            over = f"{shares} {group}"
            over += f" x ppo.minibatches={config.ppo.minibatches}" if parts != shares else ""
            mistakes.append(indivisible(f"{stage}.batch_size", size, parts, over))
    if mistakes:
        raise UserError("\n".join(mistakes))


def check_paths(config: RunConfig) -> None:
    """Files and folders that the configuration names have to be there, and its functions. Raises UserError."""
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
    for key, location in _data_places(config.data, {STAGES[stage].reads for stage in wanted_stages(config)}):
        if find(location) is None:
            raise UserError(missing(location, key))
    if config.ppo.reward_function is not None and "ppo" in wanted_stages(config):
        load_function(config.ppo.reward_function)
    if config.evaluation.judge is not None and set(ANSWERING) & set(wanted_stages(config)):
        load_function(config.evaluation.judge, key=JUDGE)


def _data_places(data: DataConfig, kinds: Set[str]) -> Iterator[tuple[str, str]]:
    """What has to be there of the data, by key, for stages that read `kinds`: a source with a hub set may do without
    its path, and one that none of them reads without its files.
    """
    if data.path is not None:
        yield "data.path", data.path
        return
    for number, source in enumerate(data.sources):
        if is_remote(source) or (is_absent(source) and not kinds & set(source.stages)):
            continue
        places = {"path": source.path, "eval_path": source.eval_path}
        yield from ((f"data.sources.{number}.{key}", place) for key, place in places.items() if place is not None)


def model_folder(location: str, key: str) -> Path:
    """The Hugging Face folder that a path means: itself, or `model` in it (a stage folder). Raises UserError."""
    folder = Path(location).expanduser()
    for place in (folder, folder / "model"):
        if (place / "config.json").is_file():
            return place
    if not folder.is_dir():
        raise UserError(f"{key}={location}: there is no such folder (looked from {Path.cwd()})")
    likely = {"actor": ANSWERING, "reward": ("reward",)}.get(key, reversed(STAGES))
    stages = [stage for stage in likely if (folder / stage / "model" / "config.json").is_file()]
    if stages:
        raise UserError(f"{key}={location} is a run folder; name one of its stages: {key}={folder / stages[0]}")
    if any((folder / name).is_dir() for name in ("checkpoints", "model")):
        raise UserError(f"{key}={location} is a stage that has not finished: finish it first (the same command again)")
    raise UserError(f"{key}={location} is no model folder: it has no config.json (Hugging Face format, safetensors)")
