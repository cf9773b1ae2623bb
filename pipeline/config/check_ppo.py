"""Check the combinations of PPO's keys. Each message has three parts: what is wrong, why, and what to type instead.

`needs.py` has the keys that need one other key.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.config.messages import indivisible
from pipeline.config.schema import RunConfig


def ppo_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield one message for each combination of keys that PPO cannot use."""
    yield from _reward_mistakes(config)
    yield from _export_mistakes(config)
    yield from _step_mistakes(config)


def _reward_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about the weights of rewards, and about a judge that also trains."""
    ppo = config.ppo
    if "model" in ppo.reward_weights and not ppo.reward_model:
        yield "ppo.reward_weights.model weighs the reward model, but ppo.reward_model=false: remove one of the two"
    own = [name for name in ppo.reward_weights if name != "model"]
    if own and ppo.reward_function is None:
        yield (
            f"ppo.reward_weights.{own[0]} weighs a reward of ppo.reward_function, which is not set: set "
            "ppo.reward_function=FILE.py:NAME, or remove the weight"
        )
    judge, reward = config.evaluation.judge, ppo.reward_function
    if judge is not None and reward is not None and Path(judge).resolve() == Path(reward).resolve():
        yield (
            f"evaluation.judge={judge} is also ppo.reward_function, and a judge must be independent of training: "
            "remove evaluation.judge (the report shows the held-out score of the reward function), or set another "
            "function"
        )


def _export_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about the selection of the exported actor."""
    ppo = config.ppo
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


def _step_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about numbers of answers, steps and tokens."""
    ppo = config.ppo
    if ppo.lora.dropout > 0:
        yield (
            f"ppo.lora.dropout={ppo.lora.dropout:g}: PPO must sample and train with the same probabilities: set "
            "ppo.lora.dropout=0"
        )
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
    answers = ppo.batch_size * ppo.samples
    if ppo.kl_target is not None and 0.2 * answers >= ppo.kl_horizon:
        yield (
            f"ppo.kl_horizon={ppo.kl_horizon} is too short for rollouts of {answers} answers: one rollout may lower "
            f"ppo.kl_coef by its full value, to 0 or below: set ppo.kl_horizon={20 * answers} or more"
        )
    needed = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > ppo.max_length:
        yield (
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {needed} exceeds ppo.max_length={ppo.max_length}: "
            f"set ppo.max_length={needed}, or lower the other two keys"
        )
    if answers % ppo.minibatches:
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
