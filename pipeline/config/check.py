"""Validate a composed configuration: turn a dictionary into a `RunConfig`, or raise an error with advice.

Every mistake that can be detected without loading a model or data is reported here, before any work.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from pipeline.config.check_engine import engine_mistakes
from pipeline.config.check_ppo import ppo_mistakes
from pipeline.config.messages import as_written, messages
from pipeline.config.schema import DataConfig, ModelConfig, PlanSection, RolloutSection, RunConfig
from pipeline.config.stage_sections import DpoSection
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
    yield from _method_mistakes(config)
    yield from _start_mistakes(config, stages)
    yield from _plan_mistakes(config)
    if config.rollout.min_new_tokens > config.rollout.max_new_tokens:
        yield (
            f"rollout.min_new_tokens={config.rollout.min_new_tokens} exceeds "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: lower rollout.min_new_tokens"
        )
    if config.rollout.stream and config.rollout.tensor_parallel > 1:
        yield (
            f"rollout.stream=true needs rollout.tensor_parallel=1, not {config.rollout.tensor_parallel}, because each "
            "rank streams complete blocks: set one of the two"
        )
    span = config.profile.steps
    if span is not None and (len(span) != 2 or span[0] > span[1]):
        yield (
            f"profile.steps={span} is not a range of steps: write the first and the last step, for example "
            "profile.steps=[5,8]"
        )
    for stage in stages:
        if getattr(config, stage).export == "best" and not getattr(config, stage).eval_every:
            yield (
                f"{stage}.export=best needs several evaluations, but {stage}.eval_every=0 evaluates only at the end: "
                f"set {stage}.eval_every=N (steps between evaluations), or {stage}.export=last"
            )
    if "ppo" in stages:
        yield from ppo_mistakes(config)
    if "dpo" in stages:
        yield from _dpo_mistakes(config.dpo)
    yield from _keys_without_effect(config, stages)
    if "reward" in stages and config.reward.init == "sft" and config.reward_model is not None:
        yield (
            "reward.init=sft starts the reward model from the SFT model, but reward_model= selects another model: "
            "remove one of the two"
        )


def _dpo_mistakes(dpo: DpoSection) -> Iterable[str]:
    """Yield messages about keys that the loss of DPO does not accept."""
    if dpo.loss == "orpo" and dpo.sft_coef:
        yield (
            f"dpo.sft_coef={dpo.sft_coef:g} with dpo.loss=orpo adds the SFT loss twice, because ORPO contains it: "
            "remove dpo.sft_coef (dpo.beta weighs the odds ratio against the SFT loss)"
        )
    if dpo.loss == "robust" and not dpo.label_smoothing:
        yield (
            "dpo.loss=robust with dpo.label_smoothing=0 is dpo.loss=sigmoid: set dpo.label_smoothing to the share of "
            "wrong labels, for example 0.1, or remove dpo.loss"
        )


def _method_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield a message if the method does not include the stage. The default, method=ppo, accepts every stage."""
    if config.method != "ppo" and config.stage not in ("all", "plan", *METHODS[config.method]):
        stages = " and ".join(METHODS[config.method])
        yield f"method={config.method} has the stages {stages}, but stage={config.stage}: remove one of the two"
    teaches = config.ppo.advantage == "distill"
    if config.method == "distill" and not teaches:
        yield (
            f"method=distill needs ppo.advantage=distill, not {config.ppo.advantage}: remove ppo= and ppo.advantage=, "
            "or set method=ppo"
        )
    if config.teacher is not None and not teaches:
        yield f"teacher={config.teacher} is used by method=distill only: set method=distill, or remove teacher="


def _plan_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about `plan` keys without an effect."""
    plan, default = config.plan, PlanSection()
    changed = [key for key in PlanSection.model_fields if getattr(plan, key) != getattr(default, key)]
    if changed and config.stage != "plan":
        key = f"plan.{changed[0]}={getattr(plan, changed[0])}"
        yield f"{key} needs stage=plan, not stage={config.stage}: add stage=plan, or remove {key}"
    elif plan.device is None and plan.ranks > 1:
        yield f"plan.ranks={plan.ranks} needs plan.device=NAME: set it, or set ranks={plan.ranks} for this machine"
    elif plan.device is not None and config.ranks is not None:
        yield (
            f"ranks={config.ranks} starts processes on this machine, but plan.device={plan.device} plans for another "
            f"one: write plan.ranks={config.ranks} instead"
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


WHITENED, SMOOTHED = ("gae", "reinforce", "reinforce_baseline"), ("sigmoid", "robust", "length_normalized")
# A key; the setting that gives it an effect, or only the key of this setting if any other value does; and whether the
# first key has an effect.
NEEDS: tuple[tuple[str, str, Callable[[RunConfig], object]], ...] = (
    ("ppo.reward_ensemble", "ppo.reward_model=true", lambda config: config.ppo.reward_model),
    ("ppo.ensemble_score", "ppo.reward_ensemble=[FOLDER]", lambda config: config.ppo.reward_ensemble),
    ("ppo.reward_threads", "ppo.reward_function=FILE.py:NAME", lambda config: config.ppo.reward_function),
    ("ppo.critic_warmup", "ppo.advantage=gae", lambda config: config.ppo.advantage == "gae"),
    ("ppo.value_clip", "ppo.advantage=gae", lambda config: config.ppo.advantage == "gae"),
    ("ppo.gamma", "ppo.advantage=gae", lambda config: config.ppo.advantage in ("gae", "reinforce")),
    ("ppo.whiten_advantages", "ppo.advantage=gae", lambda config: config.ppo.advantage in WHITENED),
    ("ppo.pair_beta", "ppo.advantage=online_dpo", lambda config: config.ppo.advantage == "online_dpo"),
    ("ppo.divide_by_std", "ppo.advantage=grpo", lambda config: config.ppo.advantage == "grpo"),
    ("ppo.resample", "ppo.advantage=grpo", lambda config: config.ppo.compares_answers),
    ("ppo.kl_target", "ppo.kl_coef=0.05", lambda config: config.ppo.kl_coef),
    ("ppo.kl_horizon", "ppo.kl_target=6", lambda config: config.ppo.kl_target),
    ("ppo.score_clip", "ppo.advantage", lambda config: config.ppo.advantage != "distill"),
    ("ppo.length_penalty", "ppo.advantage", lambda config: config.ppo.advantage != "distill"),
    ("ppo.dual_clip", "ppo.loss=clip", lambda config: config.ppo.loss == "clip"),
    ("ppo.importance_weights", "ppo.importance_cap=2", lambda config: config.ppo.importance_cap),
    ("ppo.length_free", "ppo.length_penalty=0.01", lambda config: config.ppo.length_penalty),
    ("dpo.label_smoothing", "dpo.loss=sigmoid", lambda config: config.dpo.loss in SMOOTHED),
    ("dpo.margin", "dpo.loss=simpo", lambda config: config.dpo.loss == "simpo"),
    ("dpo.undesirable_weight", "dpo.loss=kto", lambda config: config.dpo.loss == "kto"),
    ("dpo.sft_coef", "dpo.loss=sigmoid", lambda config: config.dpo.reads_pairs),
    (
        "evaluation.judge_threads",
        "evaluation.judge=FILE.py:NAME or evaluation.pair_judge=FILE.py:NAME",
        lambda config: config.evaluation.judge or config.evaluation.pair_judge,
    ),
    ("rollout.batch_size", "rollout.generator=engine", lambda config: config.rollout.generator == "engine"),
    *(
        (f"{stage}.lora.{key}", f"{stage}.lora.rank=16", attrgetter(f"{stage}.lora.rank"))
        for stage in STAGES
        for key in ("alpha", "dropout", "targets")
    ),
)


def _keys_without_effect(config: RunConfig, stages: Sequence[str]) -> Iterable[str]:
    """Yield a message for each key that has no effect and another value than null and its default."""
    for key, needed, has_effect in NEEDS:
        name, _, leaf = key.partition(".")
        section = getattr(config, name)
        value = attrgetter(leaf)(section)
        is_set = value is not None and value != attrgetter(leaf)(type(section)())
        if is_set and (name in stages or name not in STAGES) and not has_effect(config):
            other = needed.partition("=")[0]
            actual = as_written(attrgetter(other)(config))
            remedy = needed if "=" in needed else f"another {needed}"
            yield f"{key}={as_written(value)} has no effect with {other}={actual}: set {remedy}, or remove {key}"


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
