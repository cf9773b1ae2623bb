"""The stages, and which of them a configuration runs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

STAGES = ("sft", "reward", "dpo", "ppo")
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
