"""The stages: their properties, and which stages a configuration runs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.config.stage_sections import StageSection


@dataclass(frozen=True)
class Stage:
    """The properties of a stage. Its configuration section and its folder in a run have the name of the stage."""

    package: str
    """`python -m PACKAGE` starts the stage; `PACKAGE.train` has `run(config, folder)`."""
    title: str
    """Its name in the tables of the report."""
    step: str
    """The unit of its progress."""
    examples: str
    """The unit of `batch_size`, unless `example_unit` returns another one."""
    needs: str
    """What a row of data must contain, for an error message."""
    reads: str
    """The stage reads the sources with this name in `data.sources[].stages`."""
    shares: tuple[str, ...]
    """The names in `data.stage_shares` whose prompts the stage reads, if one source serves several stages."""
    progress: tuple[str, ...]
    """The metrics that the progress display shows."""
    closing: tuple[str, ...]
    """The metrics of summary.json that are printed at the end of a run."""


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
        closing=("eval_loss", "gold_score", "gold_score_at_0"),
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
        closing=("eval_accuracy", "eval_accuracy_low", "eval_accuracy_high"),
    ),
    "dpo": Stage(
        package="step2_dpo",
        title="DPO",
        step="step",
        examples="pairs",
        needs=_PAIRS,
        reads="reward",
        shares=("reward", "ppo"),  # DPO replaces both stages
        progress=(
            "loss",
            "accuracy",
            "label_accuracy",
            "margin",
            "eval_loss",
            "eval_accuracy",
            "eval_label_accuracy",
            "lr",
        ),
        closing=("eval_loss", "eval_accuracy", "eval_label_accuracy", "gold_score", "gold_score_at_0", "drift"),
    ),
    "ppo": Stage(
        package="step3_ppo",
        title="PPO",
        step="rollout",
        examples="prompts",
        needs="prompts",
        reads="ppo",
        shares=("ppo",),
        progress=(
            "score",
            "alike_prompts",
            "kl",
            "response_length",
            "eval_score",
            "gold_score",
            "gold_score_at_0",
            "lr",
        ),
        closing=("eval_score", "eval_function_score", "gold_score", "gold_score_at_0", "kl", "response_length"),
    ),
}
METHODS = {"ppo": ("sft", "reward", "ppo"), "dpo": ("sft", "dpo"), "distill": ("sft", "ppo")}
"""The stages of each method, which makes a chat model from a base model."""
POLICIES = ("dpo", "ppo")
"""The stages that train a policy further after SFT."""
ANSWERING = ("sft", *POLICIES)
"""The stages that train a chat model."""


def example_unit(stage: str, section: "StageSection") -> str:
    """Return the unit of the batch size of a stage. KTO counts answers, the other losses of DPO count pairs."""
    return STAGES[stage].examples if getattr(section, "reads_pairs", True) else "answers"


def stages_to_run(config: "RunConfig") -> list[str]:
    """Return the stages to run, in order: the one that `stage` names, or those of the method.

    `actor` replaces the SFT stage and `reward_path` the reward stage. PPO without a reward model needs no reward stage.
    With pipeline parallelism, stage=plan plans SFT only.
    """
    if config.stage not in ("all", "plan"):
        return [config.stage]
    if config.stage == "plan" and config.engine.pipeline_parallel > 1:
        return ["sft"]
    is_replaced = {
        "sft": config.actor is not None,
        "reward": config.reward_path is not None or not config.ppo.reward_model,
    }
    return [stage for stage in METHODS[config.method] if not is_replaced.get(stage)]
