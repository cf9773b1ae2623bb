"""Decide over several runs that differ in their seed whether training improved the model.

The effect of a training stage is the paired difference between two models on the same prompt. `mean_over_seeds` in
`pipeline/evaluation/intervals.py` separates its spread between seeds from its spread between prompts.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.evaluation.intervals import SeedEffect, mean_over_seeds
from pipeline.report.axes import format_interval, format_number, format_signed
from pipeline.report.data import RunReading
from pipeline.report.verdict import (
    FEWEST_PROMPTS,
    MOVED,
    SCORE,
    TOO_FEW,
    Change,
    Measure,
    Outcome,
    Verdict,
    change,
    combine,
    guard_signs,
    is_selected,
    not_proven,
    outcome_of,
    verdict_by_pairs,
)
from pipeline.report.win_rate import describe_wins, pool_wins

METHOD = (
    "The model is y = mean + seed + prompt + error, where seeds and prompts are random samples. The intervals are 95% "
    "t-intervals from its mean squares, and cover other seeds and other prompts (Searle, Casella & McCulloch, 1992)."
)


@dataclass(frozen=True)
class Effect:
    """The paired difference between two models over all seeds.

    changes: the difference of each seed, in the order of the runs
    prompts: the number of prompts of the seed that has the fewest
    """

    over_seeds: SeedEffect
    changes: Sequence[Change]
    prompts: int

    @property
    def outcome(self) -> Outcome:
        """See `outcome_of`."""
        return outcome_of(self.over_seeds.low, self.over_seeds.high, self.prompts)

    @property
    def risen(self) -> int:
        return sum(one.mean > 0 for one in self.changes)


def shared_temperatures(runs: Sequence[RunReading]) -> list[float]:
    """Return the evaluation temperatures that all runs have."""
    return [temperature for temperature in runs[0].temperatures if all(temperature in r.temperatures for r in runs)]


def effect(runs: Sequence[RunReading], measure: Measure, before: str, after: str, temperature: float) -> Effect | None:
    """Return the effect of training from one model to another; None unless every run has two prompts with both."""
    samples = [run.samples(temperature) for run in runs]
    differences = [
        {
            sample.prompt: values[after] - values[before]
            for sample in of_run
            if before in (values := getattr(sample, measure)) and after in values
        }
        for of_run in samples
    ]
    fewest = min(map(len, differences))
    changes = [found for of_run in samples if (found := change(of_run, measure, before, after))]
    if len(runs) < 2 or fewest < 2:
        return None
    return Effect(mean_over_seeds(differences), changes, fewest)


def judge_seeds(runs: Sequence[RunReading], failed: Sequence[str] = ()) -> Verdict:
    """Return the verdict over all seeds: "helped" only if the interval over seeds excludes 0 at each temperature.

    The verdict is never good if runs failed: the seeds of the other runs are no random sample.
    """
    verdicts = {temperature: _judge_at(runs, temperature) for temperature in shared_temperatures(runs)}
    found = {temperature: verdict for temperature, verdict in verdicts.items() if verdict is not None}
    if not found:
        return Verdict("open", f"{len(runs)} runs have finished.", "They have no graded held-out answers in common.")
    verdict = combine(found)
    selected = [run.name for run in runs if is_selected(run)]
    if selected:
        chosen = (
            f"The models of {len(selected)} of {len(runs)} runs ({', '.join(selected)}) were selected by their scores "
            "on these prompts, which biases the result upwards."
        )
        verdict = not_proven(replace(verdict, evidence=f"{verdict.evidence}\n{chosen}"))
    if failed:
        count = f"{len(failed)} of {len(runs) + len(failed)} runs failed"
        verdict = replace(
            verdict,
            headline=f"{verdict.headline} {count}, so a gain over all seeds is not proven.",
            evidence=f"{verdict.evidence}\nNot included, because they failed: {', '.join(failed)}.",
            outcome="open" if verdict.outcome == "good" else verdict.outcome,
        )
    signs = {run.name: guard_signs(run.stage(run.policy).guard) for run in runs}
    wrong = {name: text for name, text in signs.items() if text}
    if not wrong:
        return verdict
    headline = f"Training went wrong in {len(wrong)} of {len(runs)} runs ({', '.join(wrong)})."
    found_signs = "; ".join(f"{name} {text}" for name, text in wrong.items())
    evidence = f"Signs of the training guard: {found_signs}.\n{verdict.evidence}"
    return replace(verdict, headline=headline, evidence=evidence, outcome="bad" if verdict.outcome == "bad" else "open")


def _judge_at(runs: Sequence[RunReading], temperature: float) -> Verdict | None:
    policy = runs[0].policy
    gold = effect(runs, "gold", "sft", policy, temperature)
    count, label, start = len(runs), runs[0].labels[policy], runs[0].labels["sft"]
    wins = pool_wins([run.samples(temperature) for run in runs], policy)
    if gold is not None:
        evidence = _evidence(gold, "gold score", label, start)
        evidence += f" {describe_wins(wins, label, start)}" if wins is not None else ""
        method = "Distillation" if runs[0].rewarder == "teacher" else "RLHF" if policy == "ppo" else label
        headlines: dict[Outcome, str] = {
            "good": f"{method} helped over {count} seeds",
            "bad": f"{method} hurt over {count} seeds",
            "open": f"No clear difference between {start} and {label} over {count} seeds",
        }
        return Verdict(gold.outcome, headlines[gold.outcome], evidence, METHOD)
    if wins is not None:
        return verdict_by_pairs(wins, label, start, METHOD)
    reward = effect(runs, "scores", "sft", policy, temperature)
    if reward is None:
        return None
    rewarder = runs[0].rewarder
    headline = f"{SCORE[rewarder]} {MOVED[reward.outcome]} over {count} seeds"
    outcome = reward.outcome if rewarder == "reward function" or reward.outcome == "bad" else "open"
    trained = "PPO was trained on this score, and there is no gold score: set evaluation.judge=FILE.py:NAME."
    return Verdict(outcome, headline, f"{_evidence(reward, 'score', label, start)} {trained}", METHOD)


def _evidence(found: Effect, measure: str, label: str, start: str) -> str:
    over, changes = found.over_seeds, found.changes
    means = [statistics.fmean(getattr(one, mean) for one in changes) for mean in ("old_mean", "new_mean")]
    old, new = (f"{mean:.2f}" if measure == "gold score" else format_number(mean) for mean in means)
    few = f" {TOO_FEW}" if found.prompts < FEWEST_PROMPTS else ""
    return (
        f"Over {len(changes)} seeds the mean {measure} went from {old} after {start} to {new} after {label}: "
        f"{format_signed(over.mean)}, 95% interval "
        f"{format_interval(over.low, over.high)}. It rose in {found.risen} of {len(changes)} seeds. The standard "
        f"deviation of this change is {over.seed_deviation:.2f} between seeds and {over.prompt_deviation:.2f} between "
        f"prompts.{few}"
    )
