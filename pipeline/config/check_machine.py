"""Check a configuration against the machine: the number of ranks, and the files and folders that the keys name."""

from collections.abc import Iterator, Set
from operator import attrgetter
from pathlib import Path

from pipeline.config.check_engine import shard_ranks
from pipeline.config.messages import as_written, indivisible, no_divisor, unmet_need
from pipeline.config.schema import DataConfig, RunConfig
from pipeline.config.stages import ANSWERING, POLICIES, STAGES, stages_to_run
from pipeline.data.files import missing
from pipeline.data.hub import describe_hub_data
from pipeline.data.sources import configured_sources, is_absent, is_remote
from pipeline.errors import UserError
from pipeline.evaluation.user_function import JUDGE, PAIR_JUDGE, UserFunction, load_function
from pipeline.models.folder import model_folder
from pipeline.tracking.trackers import require_tensorboard


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Raise UserError with valid sizes if the ranks do not divide into groups, or a batch not over the ranks."""
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
    if ranks % config.rollout.tensor_parallel and set(ANSWERING) & set(stages_to_run(config)):
        raise UserError(no_divisor("rollout.tensor_parallel", config.rollout.tensor_parallel, ranks, f"{ranks} ranks"))
    sequence = config.engine.sequence_parallel
    for key, size in shard_ranks(config):
        if shares * sequence % size:
            over = f"{shares} {group}" if sequence == 1 else f"{ranks} ranks"
            raise UserError(no_divisor(f"{key}.shard_ranks", size, shares * sequence, over))
    fitting = set(range(1, shares))
    for stage in stages_to_run(config):
        size = getattr(config, stage).batch_size
        minibatches = config.ppo.minibatches if stage == "ppo" else 1
        rows, parts = size * (config.ppo.samples if stage == "ppo" else 1), shares * minibatches
        fitting = {fewer for fewer in fitting if rows % (fewer * minibatches) == 0}
        if rows % parts:
            over = f"{shares} {group}"
            over += f" x ppo.minibatches={minibatches}" if parts != shares else ""
            mistakes.append(indivisible(f"{stage}.batch_size", size, parts, over))
    if mistakes:
        key, fewer = "ranks" if config.plan.device is None else "plan.ranks", max(fitting, default=0) * ranks // shares
        raise UserError("\n".join(mistakes) + (f"; or use {fewer} ranks ({key}={fewer})" if fewer else ""))


def check_paths(config: RunConfig) -> None:
    """Raise UserError if a file, folder, function or package that the configuration needs does not exist."""
    if config.tracking.kind in ("tensorboard", "both"):
        require_tensorboard(config.tracking.kind)
    models = [("actor", config.actor), ("reward", config.reward_path), ("teacher", config.teacher)]
    for key, location in [*models, *(("ppo.reward_ensemble", folder) for folder in config.ppo.reward_ensemble)]:
        if location is not None:
            model_folder(location, key)
    for key, model in (("model", config.model), ("reward_model", config.reward_model)):
        if model is None:
            continue
        if model.path is not None:
            model_folder(model.path, f"{key}.path")
        if model.chat_template is not None and not Path(model.chat_template).is_file():
            raise UserError(f"{key}.chat_template={model.chat_template}: there is no such file")
    for key, location in _data_paths(config.data, {STAGES[stage].reads for stage in stages_to_run(config)}):
        if not Path(location).exists():
            raise UserError(missing(location, key))
    if config.ppo.reward_function is not None and "ppo" in stages_to_run(config):
        _check_turns(config, load_function(config.ppo.reward_function))
    if config.evaluation.judge is not None and set(ANSWERING) & set(stages_to_run(config)):
        load_function(config.evaluation.judge, key=JUDGE)
    if config.evaluation.pair_judge is not None and set(POLICIES) & set(stages_to_run(config)):
        load_function(config.evaluation.pair_judge, key=PAIR_JUDGE)


def _check_turns(config: RunConfig, function: UserFunction) -> None:
    """Raise UserError if a reward function that sends messages is combined with settings that do not support it."""
    needed = {"ppo.reward_model": False, "rollout.tensor_parallel": 1, "rollout.stream": False}
    for key, value in needed.items() if function.takes_turns else ():
        if (actual := attrgetter(key)(config)) != value:
            setting = f"ppo.reward_function={function.where}, which yields messages to the policy,"
            raise UserError(unmet_need(setting, f"{key}={as_written(value)}", as_written(actual)))


def hub_data(config: RunConfig) -> list[str]:
    """Download the hub data of a run, and return a line for each data set. Raises UserError if one is unreachable."""
    kinds = {STAGES[stage].reads for stage in stages_to_run(config)}
    sources = [] if config.stage == "plan" else configured_sources(config.data)
    remote = [source for source in sources if is_remote(source) and kinds & set(source.stages)]
    return describe_hub_data(config.data.name, remote)


def _data_paths(data: DataConfig, kinds: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of each data file that must exist for stages that read `kinds`.

    A source with a hub id needs no local path. A source that no stage reads may be missing.
    """
    if data.path is not None:
        yield "data.path", data.path
        return
    for number, source in enumerate(data.sources):
        if is_remote(source) or (is_absent(source) and not kinds & set(source.stages)):
            continue
        paths = {"path": source.path, "eval_path": source.eval_path}
        yield from ((f"data.sources.{number}.{key}", path) for key, path in paths.items() if path is not None)
