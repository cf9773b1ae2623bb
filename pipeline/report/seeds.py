"""Write one page about several runs that differ in their seed: the verdict over seeds, the spread, and overlaid curves.

The effect of a training stage is the paired difference between two models on the same prompt. `mean_over_seeds` in
`pipeline/evaluation/intervals.py` separates its spread between seeds from its spread between prompts.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.evaluation.intervals import SeedEffect, mean_over_seeds
from pipeline.evaluation.samples import BEST_OF
from pipeline.files import write_atomically
from pipeline.launch.fingerprint import flatten
from pipeline.report.axes import format_interval, format_number, format_signed
from pipeline.report.charts import Interval, interval_chart
from pipeline.report.comparison import page_header
from pipeline.report.curves import line_chart
from pipeline.report.data import SHOWN_MODELS, RunReading, read_run
from pipeline.report.html import Markup, element, grid, page, section, table
from pipeline.report.seed_wins import describe_pooled, judge_wins, pool_wins, wins_section
from pipeline.report.svg import Point, Series
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
    format_temperatures,
    guard_signs,
    is_selected,
    not_proven,
    outcome_of,
)

OWN_KEYS = {"seed", "name", "run_dir"}
"""The keys that may differ between the runs of one page."""
MEASURES: dict[Measure, str] = {"gold": "Gold score", "scores": "Reward score", "function": "Reward function"}
CURVES = (
    ("policy", "gold_score", "Gold score", (0, 1)),
    ("policy", "eval_score", "Held-out reward score", (None, None)),
    ("policy", "score", "Score of rollouts", (None, None)),
    ("policy", "kl", "KL to the reference, nats per answer", (None, None)),
    ("policy", "response_length", "Answer length, tokens", (0, None)),
    ("policy", "entropy", "Entropy, nats per token", (0, None)),
    ("policy", "eval_accuracy", "Held-out accuracy of pairs", (None, 1)),
    ("reward", "eval_accuracy", "Held-out accuracy of the reward model", (None, 1)),
    ("sft", "eval_loss", "Held-out SFT loss, nats per token", (None, None)),
)
SAMPLED = ("gold_score", "eval_score")
"""The curves of generated answers to held-out prompts, at the first temperature of the evaluation."""
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


def write_seed_report(run_dirs: Sequence[Path], failed: Sequence[str] = ()) -> tuple[Path, Verdict]:
    """Write the page about several finished runs next to the first run folder; return its path and its verdict.

    failed: the labels of runs that failed, which the verdict names
    Raise UserError if a folder has no finished policy, or if two runs have the same seed or different methods.
    """
    runs = [read_run(folder) for folder in run_dirs]
    for folder, run in zip(run_dirs, runs, strict=True):
        if not folder.is_dir():
            raise UserError(f"there is no run folder {folder}: write folders that contain sft/ and ppo/ or dpo/")
        if not run.stage(run.policy).finished:
            raise UserError(f"{folder} has no finished PPO or DPO stage: finish the run, or leave the folder out")
    by_seed: dict[Any, str] = {}
    for run in runs:
        if seed_of(run) in by_seed:
            raise UserError(
                f"{by_seed[seed_of(run)]} and {run.name} have the same seed {seed_of(run)}, but the page estimates the "
                "spread between seeds: write runs that differ in seed="
            )
        by_seed[seed_of(run)] = run.name
    policies = {run.policy: run.name for run in runs}
    if len(policies) > 1:
        found = ", ".join(f"{name} ends with {policy}" for policy, name in policies.items())
        raise UserError(f"the runs have different methods ({found}): write runs of one method")
    verdict = judge_seeds(runs, failed)
    name = run_dirs[0].resolve().name
    pooled = re.sub(r"seed=\d+", "seeds", name)
    path = run_dirs[0].resolve().parent / f"{pooled if pooled != name else f'{name}-seeds'}.html"
    write_atomically(path, render_seeds(path.stem, runs, verdict))
    return path, verdict


def seed_of(run: RunReading) -> Any:
    """Return the seed of a run."""
    return run.setting("seed")


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
        evidence += f" {describe_pooled(wins, label, start)}" if wins is not None else ""
        method = "Distillation" if runs[0].rewarder == "teacher" else "RLHF" if policy == "ppo" else label
        headlines: dict[Outcome, str] = {
            "good": f"{method} helped over {count} seeds",
            "bad": f"{method} hurt over {count} seeds",
            "open": f"No clear difference between {start} and {label} over {count} seeds",
        }
        return Verdict(gold.outcome, headlines[gold.outcome], evidence, METHOD)
    if wins is not None:
        return judge_wins(wins, label, start, METHOD)
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


def render_seeds(title: str, runs: Sequence[RunReading], verdict: Verdict) -> Markup:
    """Build the page about `runs`."""
    differences = _differences(runs)
    caveat = element("p", differences, class_="caveat") if differences else None
    charts = _difference_charts(runs, "gold") or _difference_charts(runs, "scores")
    sections = {
        "changes": ("Changes", _changes(runs)),
        "wins": ("Win rates", _wins(runs)),
        "seeds": ("Each seed", _by_seed(runs)),
        "curves": ("Curves", _curves(runs)),
    }
    footer = "Written by zerochat from the run folders. Each run also has its own report.html."
    return page(title, page_header("zerochat report over seeds", verdict, caveat, charts), sections, footer)


def _differences(runs: Sequence[RunReading]) -> str:
    """Return a sentence about the settings in which the runs differ, other than the seed; "" if there are none."""
    settings = [flatten(run.settings) for run in runs]
    keys = {key for flat in settings for key in flat} - OWN_KEYS
    different = sorted(key for key in keys if any(flat.get(key) != settings[0].get(key) for flat in settings))
    if not different:
        return ""
    return f"These runs differ in more than the seed: {', '.join(different)}. The spread between seeds includes this."


def _difference_charts(runs: Sequence[RunReading], measure: Measure) -> list[Markup]:
    """Draw the change from start to final model at each temperature: one row per seed, and one over all seeds."""
    charts, labels = [], runs[0].labels
    for temperature in shared_temperatures(runs):
        found = effect(runs, measure, "sft", runs[0].policy, temperature)
        if found is None:
            continue
        over = found.over_seeds
        rows = [
            Interval(f"seed {seed_of(run)}", one.mean, one.low, one.high, "plain")
            for run, one in zip(runs, found.changes, strict=True)
        ]
        rows.append(Interval("all seeds", over.mean, over.low, over.high, runs[0].policy))
        title = f"{MEASURES[measure]}: change at temperature {temperature:g}"
        note = "A seed's interval covers its prompts. The last interval also covers other seeds."
        chart = interval_chart(
            title, rows, x_name=f"{labels['sft']} to {labels[runs[0].policy]}, 95% interval", note=note
        )
        charts += [chart] if chart else []
    return charts


def _changes(runs: Sequence[RunReading]) -> Markup | None:
    policy, labels = runs[0].policy, runs[0].labels
    rows = []
    for measure, title in MEASURES.items():
        for before, after in (("base", "sft"), ("sft", policy), (BEST_OF, policy)):
            for temperature in shared_temperatures(runs):
                found = effect(runs, measure, before, after, temperature)
                if found is None:
                    continue
                over, tone = found.over_seeds, found.outcome if measure == "gold" else "open"
                rows.append(
                    (
                        f"{labels[before]} to {labels[after]}",
                        title,
                        f"{temperature:g}",
                        element("strong", format_signed(over.mean), class_=f"outcome-{tone}"),
                        format_interval(over.low, over.high),
                        f"{over.seed_deviation:.3f}",
                        f"{over.prompt_deviation:.3f}",
                        f"{found.risen} of {len(found.changes)}",
                    )
                )
    if not rows:
        return None
    lead = (
        "The spread between seeds is the standard deviation of the seeds' true changes. The spread between prompts is "
        "that of the changes of single prompts within a seed."
    )
    if runs[0].rewarder in ("reward model", "reward") and any(row[1] == MEASURES["scores"] for row in rows):
        lead += " Reward models that were trained with different seeds have no common scale of scores."
    head = ("Change", "Measure", "Temperature", "Mean", "95% interval", "SD, seeds", "SD, prompts", "Seeds that rose")
    return section("changes", "What each stage changed", lead, table(head, rows, numbers=range(2, 8)))


def _wins(runs: Sequence[RunReading]) -> Markup | None:
    policy = runs[0].policy
    found = {at: pool_wins([run.samples(at) for run in runs], policy) for at in shared_temperatures(runs)}
    title = f"{runs[0].labels[policy]} against {runs[0].labels['sft']}, pair by pair"
    return wins_section({at: wins for at, wins in found.items() if wins}, [seed_of(run) for run in runs], title)


def _by_seed(runs: Sequence[RunReading]) -> Markup | None:
    rows = [
        (run.name, str(seed_of(run)), MEASURES[measure], f"{temperature:g}", format_number(found.old_mean),
         format_number(found.new_mean), format_signed(found.mean),
         "one prompt only" if math.isnan(found.low) else format_interval(found.low, found.high))
        for measure in MEASURES
        for temperature in shared_temperatures(runs)
        for run in runs
        if (found := change(run.samples(temperature), measure, "sft", run.policy))
    ]  # fmt: skip
    if not rows:
        return None
    models = (runs[0].labels[model] for model in ("sft", runs[0].policy))
    head = ("Run", "Seed", "Measure", "Temperature", *models, "Change", "95% interval")
    lead = "Paired differences within each run. The intervals cover the prompts of the run only."
    return section("seeds", "Each seed", lead, table(head, rows, numbers=range(3, 8)))


def _curves(runs: Sequence[RunReading]) -> Markup | None:
    charts = []
    first = {run.temperatures[0] for run in runs if run.temperatures}
    at = f" at {format_temperatures(sorted(first))}" if first else ""
    for stage, key, title, bounds in CURVES:
        name = runs[0].policy if stage == "policy" else stage
        curves = [run.stage(name).series(key) for run in runs]
        shown = [points for points in curves if points]
        if not shown:
            continue
        tone = name if name in SHOWN_MODELS else "plain"
        series = [Series(f"seed {seed_of(run)}", c, tone, faint=True) for run, c in zip(runs, curves, strict=True) if c]
        series.append(Series("mean", _mean_curve(shown), "strong", exact=True))
        sampled = f"{title}{at if key in SAMPLED else ''}"
        charts.append(line_chart(sampled, series, x_name="rollout" if name == "ppo" else "step", bounds=bounds))
    figures = grid(charts)
    if figures is None:
        return None
    lead = "Thin lines: single seeds. Thick lines: their mean, at the steps that all seeds logged."
    return section("curves", "Curves of all seeds", lead, figures)


def _mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    tables = [dict(points) for points in curves]
    steps = [step for step in tables[0] if all(step in values for values in tables)]
    return [(step, statistics.fmean(values[step] for values in tables)) for step in steps]
