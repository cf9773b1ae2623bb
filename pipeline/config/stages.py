"""The stages: what tells one from another, and which of them a configuration runs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


@dataclass(frozen=True)
class Stage:
    """What is asked of every stage alike. Its section of the configuration and its folder in a run bear its name."""

    package: str
    """`python -m PACKAGE` starts it; `PACKAGE.train` has `run(config, folder)`."""
    title: str
    """What the report's tables call it."""
    step: str
    """What it counts its progress in."""
    examples: str
    """What `batch_size` counts."""
    needs: str
    """What a row of data must have, for the message where none has."""
    reads: str
    """The name in `data.sources[].stages` of the sources that it reads."""
    shares: tuple[str, ...]
    """The names in `data.stage_shares` of the prompts that are its own, where sources are shared."""
    progress: tuple[str, ...]
    """The figures of a step that are shown while it runs."""
    closing: tuple[str, ...]
    """The figures of summary.json that a run's last lines show."""


_PAIRS = "prompt + chosen + rejected"

STAGES = {
    "sft": Stage(
        package="step1_sft",
        title="SFT",
        step="step",
        examples="conversations",
        needs="answers to imitate",
        reads="sft",
        shares=("sft",),
        progress=("loss", "eval_loss", "lr"),
        closing=("eval_loss", "gold_score"),
    ),
    "reward": Stage(
        package="step2_reward",
        title="Reward",
        step="step",
        examples="pairs",
        needs=_PAIRS,
        reads="reward",
        shares=("reward",),
        progress=("loss", "accuracy", "margin", "eval_accuracy", "lr"),
        closing=("eval_accuracy",),
    ),
    "dpo": Stage(
        package="step2_dpo",
        title="DPO",
        step="step",
        examples="pairs",
        needs=_PAIRS,
        reads="reward",
        shares=("reward", "ppo"),  # it takes the place of both
        progress=("loss", "accuracy", "margin", "eval_loss", "eval_accuracy", "lr"),
        closing=("eval_loss", "eval_accuracy", "gold_score", "drift"),
    ),
    "ppo": Stage(
        package="step3_ppo",
        title="PPO",
        step="rollout",
        examples="prompts",
        needs="prompts",
        reads="ppo",
        shares=("ppo",),
        progress=("score", "kl", "response_length", "eval_score", "gold_score", "lr"),
        closing=("eval_score", "eval_function_score", "gold_score", "kl", "response_length"),
    ),
}
METHODS = {"ppo": ("sft", "reward", "ppo"), "dpo": ("sft", "dpo")}
"""Ways from a base model to a chat model, and the stages of each."""
POLICIES = ("dpo", "ppo")
"""Those that make another policy of SFT's."""
ANSWERING = ("sft", *POLICIES)
"""Those that make a model to talk to."""


def wanted_stages(config: "RunConfig") -> list[str]:
    """The stages to run, in order: one, or those of the method. `actor` and `reward_path` stand in for the stages that
    would make them; PPO may do without a reward model.
    """
    if config.stage not in ("all", "plan"):
        return [config.stage]
    spared = {"sft": config.actor is not None, "reward": config.reward_path is not None or not config.ppo.reward_model}
    return [stage for stage in METHODS[config.method] if not spared.get(stage)]
