"""The edge: a composed dictionary becomes a `RunConfig`, or one clear message says what to write instead.

Everything that can be refused without loading a model or data is refused here, before any work.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.engines import engine_mistakes
from pipeline.config.messages import indivisible, messages
from pipeline.config.schema import DataConfig, ModelConfig, PpoSection, RunConfig
from pipeline.config.stages import METHODS, POLICIES, STAGES, wanted_stages
from pipeline.errors import UserError


def validate(raw: Mapping[str, Any]) -> RunConfig:
    """Types, bounds and pairs that can't go together. Raises UserError with one line for each mistake."""
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as problem:
        raise UserError("\n".join(messages(problem, RunConfig))) from None
    mistakes = [*_pair_mistakes(config), *engine_mistakes(config)]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return config


def _pair_mistakes(config: RunConfig) -> Iterable[str]:
    yield from _model_mistakes("model", config.model)
    if config.reward_model is not None:
        yield from _model_mistakes("reward_model", config.reward_model)
    yield from _data_mistakes(config.data)
    if "name" in config.model_fields_set and config.name is not None and not _is_folder_name(config.name):
        yield f"name={config.name}: a run name has letters, digits and . _ - = , only (run_dir= takes a path)"
    stages = wanted_stages(config)
    yield from _start_mistakes(config, stages)
    if config.rollout.min_new_tokens > config.rollout.max_new_tokens:
        yield (
            f"rollout.min_new_tokens={config.rollout.min_new_tokens} exceeds "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: lower it"
        )
    if config.rollout.stream and config.rollout.tensor_parallel > 1:
        yield (
            f"rollout.stream=true needs rollout.tensor_parallel=1, not {config.rollout.tensor_parallel}: ranks whose "
            "blocks come one at a time do not generate together"
        )
    span = config.profile.steps
    if span is not None and (len(span) != 2 or span[0] > span[1]):
        yield f"profile.steps={span}: write the first and the last step to record, as in profile.steps=[5,8]"
    for stage in stages:
        if getattr(config, stage).export == "best" and not getattr(config, stage).eval_every:
            yield (
                f"{stage}.export=best has one evaluation to choose from: {stage}.eval_every=N, steps between "
                f"evaluations, or {stage}.export=last"
            )
    if "ppo" in stages:
        yield from _ppo_mistakes(config)
    if "dpo" in stages and config.dpo.loss == "ipo" and config.dpo.label_smoothing:
        yield (
            f"dpo.label_smoothing={config.dpo.label_smoothing:g} is for dpo.loss=sigmoid, not ipo: leave "
            "one of the two out"
        )
    if "reward" in stages and config.reward.init == "sft" and config.reward_model is not None:
        yield "reward.init=sft starts from the SFT model, reward_model= from another one: leave one of them out"


def _start_mistakes(config: RunConfig, stages: Sequence[str]) -> Iterable[str]:
    """A method, or a model to start from, that the stages don't have."""
    if config.method != "ppo" and config.stage not in ("all", "plan", *METHODS[config.method]):  # ppo is there unasked
        has = " and ".join(METHODS[config.method])
        yield f"method={config.method} has the stages {has}, but stage={config.stage}: leave one of the two out"
    for key, shown, serves in (("actor", "actor", POLICIES[::-1]), ("reward_path", "reward", ("ppo",))):
        if getattr(config, key) is None or set(serves) & set(stages):
            continue
        asked = f"stage={config.stage}" if config.stage in STAGES else f"method={config.method}"
        who = " or ".join(stage.upper() for stage in serves)
        yield (
            f"{shown}={getattr(config, key)} is where {who} starts, but {asked}: leave it out, or stage={serves[0]} "
            "(model.path=FOLDER is where the other stages start)"
        )


def _is_folder_name(name: str) -> bool:
    return bool(name) and name.strip(".") != "" and all(c.isalnum() or c in "._-=,+" for c in name)


def _model_mistakes(key: str, model: ModelConfig) -> Iterable[str]:
    if model.weights == "pretrained" and not (model.path or model.hub):
        yield f"{key} has no weights to load: {key}.path=FOLDER, {key}.hub=ORGANISATION/NAME, or {key}.weights=random"
    if model.weights == "random" and not model.architecture:
        shape = f"{key}.architecture={{model_type: ..., ...}}"
        yield f"{key}.weights=random has nothing to build: {shape}, or an option of conf/model"
    if model.architecture and "model_type" not in model.architecture:
        yield (
            f"{key}.architecture.model_type is missing: the family in transformers' words (opt, llama, qwen3, ...); "
            f"{key}.architecture.KEY=VALUE changes one field of an option's"
        )


def _data_mistakes(data: DataConfig) -> Iterable[str]:
    if not data.path and not data.sources:
        yield "data has nothing to read: data.path=FILE, or an option of conf/data"
    for number, source in enumerate(data.sources):
        kinds = [name for name in ("path", "hub", "builtin") if getattr(source, name)]
        if not kinds:
            yield f"data.sources.{number} has nothing to read: give it a path, a hub id or builtin: demo"
        if source.eval_path and not source.path:
            held = "eval_split=NAME, of a hub set" if source.hub else "path=FILE"
            yield f"data.sources.{number}.eval_path={source.eval_path} goes with a path: give {held}, or leave it out"
    shares = data.stage_shares
    if not shares or min(shares.values()) < 0 or sum(shares.values()) <= 0:
        yield f"data.stage_shares={shares}: shares must be 0 or more, and one of them more than 0"


def _ppo_mistakes(config: RunConfig) -> Iterable[str]:
    ppo = config.ppo
    if not ppo.reward_model:
        yield from _without_reward_model(config)
    judge = config.evaluation.judge
    if judge is not None and _trains(config, judge):
        yield (
            f"evaluation.judge={judge} is what PPO is trained on, and a judge trains nothing: leave it out (the report "
            "has the reward function's held-out score by itself), or give another function"
        )
    if ppo.lora.dropout > 0:
        yield (
            f"ppo.lora.dropout={ppo.lora.dropout:g}: PPO needs the same probabilities when it samples and when it "
            "trains; ppo.lora.dropout=0"
        )
    if ppo.export == "best" and ppo.ema is not None:
        yield f"ppo.export=best and ppo.ema={ppo.ema:g} both say which actor is exported: leave one of them out"
    if ppo.shared_forward and ppo.minibatches > 1:
        yield (
            f"ppo.shared_forward=true learns from the forwards that scored a rollout, which are of all of it, and "
            f"ppo.minibatches={ppo.minibatches} cuts it: ppo.minibatches=1, or leave ppo.shared_forward out"
        )
    if ppo.advantage != "gae":
        if ppo.samples < 2 and ppo.advantage != "reinforce":
            yield (
                f"ppo.advantage={ppo.advantage} holds an answer against the others to its prompt, and ppo.samples="
                f"{ppo.samples}: ppo.samples=4, or ppo.advantage=gae"
            )
        if ppo.critic_warmup:
            yield (
                f"ppo.critic_warmup={ppo.critic_warmup}, but ppo.advantage={ppo.advantage} has no critic: leave it "
                "out, or ppo.advantage=gae"
            )
    if ppo.kl_estimator == "k1" and ppo.kl_counts_in == "loss":
        yield (
            "ppo.kl_estimator=k1 in the loss has a gradient that is 0 on average: ppo.kl_estimator=k2 or k3, or "
            "ppo.kl_in=reward"
        )
    if ppo.length_free and not ppo.length_penalty:
        yield f"ppo.length_free={ppo.length_free} is free of ppo.length_penalty, which is 0: set it, or leave both out"
    if ppo.length_penalty and ppo.length_free >= config.rollout.max_new_tokens:
        yield (
            f"ppo.length_free={ppo.length_free} leaves ppo.length_penalty nothing to count: below "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
        )
    if not ppo.divide_by_std and ppo.advantage != "grpo":
        yield f"ppo.divide_by_std=false is for ppo.advantage=grpo, not {ppo.advantage}: leave it out"
    if ppo.kl_target is not None and ppo.kl_coef == 0:
        yield f"ppo.kl_target={ppo.kl_target:g} adapts ppo.kl_coef, and 0 stays 0: ppo.kl_coef=0.05"
    if ppo.reference is False and ppo.kl_coef > 0:
        weight = f"ppo.kl_coef={ppo.kl_coef:g}"
        yield f"ppo.reference=false, but {weight} weighs the KL to it: ppo.kl_coef=0, or leave it out"
    needed = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > ppo.max_length:
        yield (
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {needed} exceed ppo.max_length={ppo.max_length}: "
            f"ppo.max_length={needed}, or shorter ones"
        )
    if ppo.batch_size * ppo.samples % ppo.minibatches:
        yield indivisible("ppo.batch_size", ppo.batch_size, ppo.minibatches, f"ppo.minibatches={ppo.minibatches}")


def _trains(config: RunConfig, judge: str) -> bool:
    """Whether PPO is trained on a function."""
    reward = config.ppo.reward_function
    return reward is not None and Path(judge).resolve() == Path(reward).resolve()


def _without_reward_model(config: RunConfig) -> Iterable[str]:
    """What can't be had where no reward model is wanted."""
    if config.ppo.reward_function is None:
        yield (
            "ppo.reward_model=false leaves nothing that scores answers: give ppo.reward_function=FILE.py:NAME, or "
            "leave ppo.reward_model out"
        )
    if config.reward_path is not None:
        yield f"reward={config.reward_path} is a reward model, and ppo.reward_model=false wants none: leave one out"


PLAIN_SAMPLING = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "min_new_tokens": 0}


def warnings(config: RunConfig) -> list[str]:
    """What is allowed and probably not meant."""
    found = []
    changed = [
        f"rollout.{key}={getattr(config.rollout, key):g}"
        for key, plain in PLAIN_SAMPLING.items()
        if getattr(config.rollout, key) != plain
    ]
    if "ppo" in wanted_stages(config) and changed:
        found.append(
            f"{' '.join(changed)}: PPO samples from a cut distribution and trains the whole one; "
            f"{' '.join(f'rollout.{key}={plain}' for key, plain in PLAIN_SAMPLING.items())} is what its ratios assume"
        )
    if "ppo" in wanted_stages(config) and config.reward_model is not None and not config.ppo.reward_model:
        found.append(f"reward_model={config.reward_model.name} is not used: ppo.reward_model=false has none")
    if config.method == "dpo" and config.reward_model is not None:
        found.append(f"reward_model={config.reward_model.name} is not used: method=dpo has none")
    if "ppo" in wanted_stages(config):
        found += _engines_of_nobody(config.ppo)
        if config.ppo.reward_threads > 1 and config.ppo.reward_function is None:
            found.append(f"ppo.reward_threads={config.ppo.reward_threads} is not used: there is no ppo.reward_function")
    if config.evaluation.judge_threads > 1 and config.evaluation.judge is None:
        found.append(f"evaluation.judge_threads={config.evaluation.judge_threads} is not used: there is no judge")
    if config.engine.deepspeed is not None:
        from engine import deepspeed_json

        found += [f"engine.deepspeed: {line}" for line in deepspeed_json.ignored(config.engine.deepspeed)]
        found += _other_batches(config, config.engine.deepspeed)
    return found


def _engines_of_nobody(ppo: PpoSection) -> Iterable[str]:
    """Engine keys of a model that this PPO does without."""
    gone = (
        ("critic_engine", ppo.advantage != "gae", f"ppo.advantage={ppo.advantage} has no critic"),
        ("reference_engine", not ppo.asks_reference, "ppo.kl_coef=0 has no reference (ppo.reference=true does)"),
        ("reference_engine", ppo.lora.rank > 0, "the actor without its adapters is the reference"),
        ("reward_engine", not ppo.reward_model, "ppo.reward_model=false has no reward model"),
    )
    for key, without, why in gone:
        if without and getattr(ppo, key):
            yield f"ppo.{key} is not used: {why}"


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
