"""Write one page about runs that differ in their seed: the verdict over seeds, the spread, and overlaid curves."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files import write_atomically
from pipeline.launch.fingerprint import flatten
from pipeline.report.axes import format_interval, format_number, format_signed
from pipeline.report.changes import Measure, change, change_over, shared_temperatures
from pipeline.report.charts import Interval, interval_chart
from pipeline.report.comparison import MEASURES, WINS_LEAD, changes_table, page_header, wins_table
from pipeline.report.curves import line_chart
from pipeline.report.data import SHOWN_MODELS, RunReading, read_run
from pipeline.report.html import Markup, element, grid, page, section, table
from pipeline.report.svg import Point, Series
from pipeline.report.verdict import Verdict, format_temperatures, judge_seeds
from pipeline.report.win_rate import WinRate, pool_wins

OWN_KEYS = {"seed", "name", "run_dir"}
"""The keys that may differ between the runs of one page."""
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
WINS = (
    "The intervals of all seeds also cover other seeds. The length-controlled rate of all seeds is the mean of those "
    "of the seeds, with a t-interval. It is at least as wide as the intervals of the seeds make it."
)


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
        seed = run.setting("seed")
        if seed in by_seed:
            raise UserError(
                f"{by_seed[seed]} and {run.name} have the same seed {seed}, but the page estimates the "
                "spread between seeds: write runs that differ in seed="
            )
        by_seed[seed] = run.name
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
    return page(title, page_header(f"zerochat report over seeds: {title}", verdict, caveat, charts), sections, footer)


def _seed(run: RunReading) -> str:
    return f"seed {run.setting('seed')}"


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
        found = change_over(runs, measure, "sft", runs[0].policy, temperature)
        if found is None:
            continue
        rows = [
            Interval(_seed(run), one.mean, one.low, one.high, "plain")
            for run, one in zip(runs, found.by_seed, strict=True)
        ]
        rows.append(Interval("all seeds", found.mean, found.low, found.high, runs[0].policy))
        title = f"{MEASURES[measure]}: change at temperature {temperature:g}"
        note = "A seed's interval covers its prompts. The last interval also covers other seeds."
        chart = interval_chart(
            title, rows, x_name=f"{labels['sft']} to {labels[runs[0].policy]}, 95% interval", note=note
        )
        charts += [chart] if chart else []
    return charts


def _changes(runs: Sequence[RunReading]) -> Markup | None:
    changes = changes_table(runs)
    if changes is None:
        return None
    lead = (
        "The spread between seeds is the standard deviation of the seeds' true changes. The spread between prompts is "
        "that of the changes of single prompts within a seed."
    )
    if runs[0].policy == "ppo" and runs[0].rewarder in ("reward model", "reward"):
        lead += " Reward models that were trained with different seeds have no common scale of scores."
    return section("changes", "What each stage changed", lead, changes)


def _wins(runs: Sequence[RunReading]) -> Markup | None:
    policy, rows = runs[0].policy, list[tuple[str, float, WinRate]]()
    for temperature in shared_temperatures(runs):
        wins = pool_wins([run.samples(temperature) for run in runs], policy)
        if wins is not None:
            rows += [(_seed(run), temperature, one) for run, one in zip(runs, wins.by_seed, strict=True)]
            rows.append(("all seeds", temperature, wins))
    title = f"{runs[0].labels[policy]} against {runs[0].labels['sft']}, pair by pair"
    return section("wins", title, f"{WINS_LEAD} {WINS}", wins_table("Seed", rows)) if rows else None


def _by_seed(runs: Sequence[RunReading]) -> Markup | None:
    rows = [
        (run.name, str(run.setting("seed")), MEASURES[measure], f"{temperature:g}", format_number(found.old_mean),
         format_number(found.new_mean), format_signed(found.mean),
         format_interval(found.low, found.high))
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
        series = [Series(_seed(run), c, tone, faint=True) for run, c in zip(runs, curves, strict=True) if c]
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
