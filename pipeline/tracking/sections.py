"""Group the metrics of a step into sections, the same in wandb and TensorBoard."""

import re
from collections.abc import Mapping

SECTIONS = (
    ("held_out", r"eval_.*|gold_score.*|judge_.*|.*_at_[\d.]+"),
    ("speed", r".*_seconds|.*_per_second|.*_bytes|seconds|tokens"),
    ("optimizer", r"(critic_)?(lr|grad_norm)|skipped_steps|kl_coef"),
    ("critic", r"value.*|return|explained_variance"),
    ("policy", r"kl.*|approx_kl|entropy|policy_loss|clip_fraction|first_ratio.*|generator_.*"),
    ("rollout", r"score.*|reward.*|function_score|response_length.*|eos_rate|alike_prompts|length_correlation"),
)
"""The sections, each with a pattern of the names of its metrics. The first that matches counts."""
OTHER = "train"


def sectioned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with the name SECTION/NAME."""
    return {f"{section_of(name)}/{name}": value for name, value in metrics.items()}


def section_of(name: str) -> str:
    """Return the section of a metric."""
    return next((section for section, pattern in SECTIONS if re.fullmatch(pattern, name)), OTHER)
