"""Check the combinations of PPO's keys. Each message has three parts: what is wrong, why, and what to type instead."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.config.messages import indivisible
from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import PpoSection


def ppo_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield one message for each combination of keys that PPO cannot use, or in which a key has no effect."""
    ppo = config.ppo
    yield from _reward_mistakes(config)
    yield from _export_mistakes(config)
    yield from _advantage_mistakes(ppo)
    yield from _kl_mistakes(ppo)
    yield from _ratio_mistakes(ppo)
    yield from _size_mistakes(config)


def _reward_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about the models and functions that score answers."""
    ppo = config.ppo
    if ppo.advantage == "distill":
        yield from _distill_mistakes(config)
    elif not ppo.reward_model:
        yield from _without_reward_model(config)
    if "model" in ppo.reward_weights and not ppo.reward_model:
        yield "ppo.reward_weights.model weighs the reward model, but ppo.reward_model=false: remove one of the two"
    own = [name for name in ppo.reward_weights if name != "model"]
    if own and ppo.reward_function is None:
        yield (
            f"ppo.reward_weights.{own[0]} weighs a reward of ppo.reward_function, which is not set: set "
            "ppo.reward_function=FILE.py:NAME, or remove the weight"
        )
    judge = config.evaluation.judge
    if judge is not None and _trains(config, judge):
        yield (
            f"evaluation.judge={judge} is also ppo.reward_function, and a judge must be independent of training: "
            "remove evaluation.judge (the report shows the held-out score of the reward function), or set another "
            "function"
        )


def _export_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about the exported actor, its adapters and the guard."""
    ppo = config.ppo
    if ppo.lora.dropout > 0:
        yield (
            f"ppo.lora.dropout={ppo.lora.dropout:g}: PPO must sample and train with the same probabilities: set "
            "ppo.lora.dropout=0"
        )
    if ppo.export == "best" and ppo.ema is not None:
        yield f"ppo.export=best and ppo.ema={ppo.ema:g} both select the exported actor: remove one of the two"
    has_judge = config.evaluation.judge is not None or (
        config.data.path is None and all(s.builtin == "demo" for s in config.data.sources)
    )
    if ppo.export == "best" and not has_judge and not ppo.needs_reference:
        yield (
            "ppo.export=best without a judge selects by the reward within a KL budget, but ppo.kl_coef=0 measures no "
            "KL: set evaluation.judge=FILE.py:NAME, or ppo.reference=true"
        )
    if ppo.export == "best" and not has_judge and ppo.advantage == "distill":
        yield (
            "ppo.export=best without a judge has no grade to select by, because ppo.advantage=distill has no reward: "
            "set evaluation.judge=FILE.py:NAME, or remove ppo.export"
        )
    if ppo.guard == "rollback" and config.engine.deepspeed and _sets_learning_rate(config.engine.deepspeed):
        yield (
            "ppo.guard=rollback lowers ppo.lr, but engine.deepspeed sets the learning rate: write "
            '"auto" for the rate in its optimizer or scheduler, or set ppo.guard=stop'
        )


def _advantage_mistakes(ppo: PpoSection) -> Iterable[str]:
    """Yield messages about keys that the advantage estimator does not accept."""
    if ppo.samples < 2 and ppo.compares_answers:
        yield (
            f"ppo.advantage={ppo.advantage} compares the answers to one prompt, but ppo.samples={ppo.samples}: set "
            "ppo.samples=4, or ppo.advantage=gae"
        )
    if ppo.steps is not None and ppo.critic_warmup >= ppo.steps:
        yield (
            f"ppo.critic_warmup={ppo.critic_warmup} leaves no rollout of ppo.steps={ppo.steps} that trains the actor: "
            "lower ppo.critic_warmup, or raise ppo.steps"
        )
    if ppo.advantage == "online_dpo" and ppo.reference is False:
        yield (
            "ppo.advantage=online_dpo compares the policy with the reference, but ppo.reference=false: remove "
            "ppo.reference"
        )
    if ppo.advantage == "online_dpo" and ppo.kl_in == "reward":
        yield (
            "ppo.kl_in=reward has no effect, because ppo.advantage=online_dpo ranks answers by their scores: set "
            "ppo.kl_in=loss, or ppo.kl_coef=0"
        )
    if ppo.advantage == "online_dpo" and ppo.unfinished == "mask":
        yield (
            "ppo.unfinished=mask leaves out one answer of a pair, but ppo.advantage=online_dpo trains on both: set "
            "ppo.unfinished=penalize"
        )


def _kl_mistakes(ppo: PpoSection) -> Iterable[str]:
    """Yield messages about the KL divergence to the reference."""
    if ppo.kl_estimator == "k1" and ppo.kl_counts_in == "loss":
        yield (
            "ppo.kl_estimator=k1 in the loss has a gradient that is 0 on average: set ppo.kl_estimator=k2 or k3, or "
            "ppo.kl_in=reward"
        )
    if ppo.kl_estimator == "k3_weighted" and ppo.kl_counts_in == "reward":
        yield (
            "ppo.kl_estimator=k3_weighted weighs the KL in the loss, but the KL counts in the reward, where the policy "
            "ratio is 1: set ppo.kl_in=loss, or ppo.kl_estimator=k3"
        )
    answers = ppo.batch_size * ppo.samples
    if ppo.kl_target is not None and 0.2 * answers >= ppo.kl_horizon:
        yield (
            f"ppo.kl_horizon={ppo.kl_horizon} is too short for rollouts of {answers} answers: one rollout may lower "
            f"ppo.kl_coef by its full value, to 0 or below: set ppo.kl_horizon={20 * answers} or more"
        )
    if ppo.reference is False and ppo.kl_coef > 0 and ppo.advantage != "distill":
        yield (
            f"ppo.reference=false, but ppo.kl_coef={ppo.kl_coef:g} weighs the KL to the reference: set ppo.kl_coef=0, "
            "or remove ppo.reference"
        )


def _ratio_mistakes(ppo: PpoSection) -> Iterable[str]:
    """Yield messages about policy ratios and the forward passes that updates reuse."""
    if ppo.ratio == "sequence" and not ppo.compares_answers:
        yield (
            f"ppo.ratio=sequence needs one advantage for each answer, but ppo.advantage={ppo.advantage} has one for "
            "each token: set ppo.advantage=grpo and ppo.samples=4 (or ppo=gspo), or ppo.ratio=token"
        )
    if ppo.shared_forward and ppo.minibatches > 1:
        yield (
            "ppo.shared_forward=true reuses forward passes over all answers of a rollout, but with "
            f"ppo.minibatches={ppo.minibatches} an update trains on a part of the answers: set ppo.minibatches=1, or "
            "remove ppo.shared_forward"
        )
    if ppo.shared_forward and ppo.unfinished == "mask":
        yield (
            "ppo.shared_forward=true reuses forward passes over all answers of a rollout, but ppo.unfinished=mask "
            "leaves out some of these answers: set ppo.unfinished=penalize, or remove ppo.shared_forward"
        )
    if ppo.shared_forward and ppo.ptx_coef and ppo.advantage != "gae":
        yield (
            f"ppo.shared_forward=true has no effect with ppo.ptx_coef={ppo.ptx_coef:g}, because the updates of the "
            "actor also train on SFT data, and there is no critic: remove one of the two"
        )


def _size_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about lengths and batch sizes."""
    ppo = config.ppo
    if ppo.length_penalty and ppo.length_free >= config.rollout.max_new_tokens:
        yield (
            f"ppo.length_free={ppo.length_free} is not below rollout.max_new_tokens={config.rollout.max_new_tokens}, "
            "so ppo.length_penalty has no effect: lower ppo.length_free, or remove both"
        )
    needed = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > ppo.max_length:
        yield (
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {needed} exceeds ppo.max_length={ppo.max_length}: "
            f"set ppo.max_length={needed}, or lower the other two keys"
        )
    if ppo.batch_size * ppo.samples % ppo.minibatches:
        yield indivisible("ppo.batch_size", ppo.batch_size, ppo.minibatches, f"ppo.minibatches={ppo.minibatches}")


def _sets_learning_rate(file: Mapping[str, Any]) -> bool:
    """Return whether a DeepSpeed file sets the learning rate, so that two values of `lr` give the same rates."""
    from engine import OptimizerConfig, deepspeed_json  # a late import: it imports torch

    rates = []
    for lr in (1.0, 2.0):
        parsed = deepspeed_json.parse(file, ranks=None, optimizer=OptimizerConfig(lr=lr, total_steps=9))
        rate = parsed.optimizer.lr if parsed.optimizer is not None else lr
        rates.append([rate if parsed.scheduler is None else parsed.scheduler(step) for step in range(9)])
    return rates[0] == rates[1]


def _trains(config: RunConfig, judge: str) -> bool:
    """Return whether the judge is also PPO's reward function."""
    reward = config.ppo.reward_function
    return reward is not None and Path(judge).resolve() == Path(reward).resolve()


def _without_reward_model(config: RunConfig) -> Iterable[str]:
    """Yield messages about keys that need a reward model."""
    if config.ppo.reward_function is None:
        yield (
            "ppo.reward_model=false needs another scorer of answers: set ppo.reward_function=FILE.py:NAME, or remove "
            "ppo.reward_model"
        )
    if config.reward_path is not None:
        yield f"reward={config.reward_path} selects a reward model, but ppo.reward_model=false: remove one of the two"


def _distill_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about settings that distillation lacks or does not use."""
    ppo = config.ppo
    if config.teacher is None:
        yield "ppo.advantage=distill learns from a teacher: set teacher=FOLDER (a model folder, or RUN/sft, RUN/ppo)"
    if ppo.reward_model or ppo.reward_function is not None or config.reward_path is not None:
        used = next(
            (
                f"{key}={value}"
                for key, value in (("ppo.reward_function", ppo.reward_function), ("reward", config.reward_path))
                if value
            ),
            "ppo.reward_model=true",
        )
        yield (
            f"{used} has no effect, because ppo.advantage=distill has no reward: select ppo=distill and remove it (a "
            "function that grades the result is evaluation.judge=FILE.py:NAME)"
        )
    if ppo.kl_coef > 0:
        yield (
            f"ppo.kl_coef={ppo.kl_coef:g} would count the KL to the teacher twice, because ppo.advantage=distill "
            "minimizes it: set ppo.kl_coef=0"
        )
    if ppo.reference is False:
        yield "ppo.advantage=distill reads the log-probabilities of the teacher, but ppo.reference=false: remove it"
