"""The text that ends a run: metrics of each stage, verdict, paths of model and report, and the chat command."""

import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.messages import format_time
from pipeline.config.schema import RunConfig
from pipeline.config.stages import ANSWERING, POLICIES, STAGES
from pipeline.files import read_object, read_plan, read_settings, summary_metrics
from pipeline.installation import CHAT
from pipeline.launch.fingerprint import ROLLOUT_EXECUTION_KEYS, flatten
from pipeline.launch.manifest import Manifest, has_checkpoints

VERDICT_WIDTH = 92  # columns; 8 more for the word "verdict" or its indentation


def summarize_run(run_dir: Path, verdict: str | None = None) -> str:
    """Return the summary of a run, printed when the run ends.

    One line per finished stage has its metrics. The next lines have the verdict, the paths of the model and the
    report, the command that uploads wandb's offline runs, and the command that starts a chat.
    """
    metrics = {stage: text for stage in STAGES if (text := stage_figures(run_dir, stage)) is not None}
    lines = [f"{stage:<7} {text}".rstrip() for stage, text in metrics.items()]
    newest = next((stage for stage in Manifest.read(run_dir).answering() if stage in metrics), "reward")
    lines += [line for stage in metrics if (line := planned_time(run_dir, stage))]
    if verdict is not None:
        lines += wrap_verdict(verdict)
    lines.append(f"model   {run_dir / newest / 'model'}")
    if (run_dir / "report.html").exists():
        lines.append(f"report  {run_dir / 'report.html'}")
    if next((run_dir / "wandb").glob("offline-run-*"), None) is not None:
        lines.append(f"wandb   offline; to upload: wandb sync {shlex.quote(str(run_dir))}/wandb/offline-run-*")
    if newest != "reward":
        lines.append(f"talk    {CHAT} {shlex.quote(str(run_dir))}")
    return "\n".join(lines)


def planned_time(run_dir: Path, stage: str) -> str:
    """Return one line with the planned and the measured time of a stage; "" without a plan."""
    planned = read_plan(run_dir / stage).get("stage_seconds")
    took = figure(read_object(run_dir / stage / "summary.json"), "seconds")
    if not isinstance(planned, int | float) or planned <= 0 or not took:
        return ""
    return f"time    {stage} planned {format_time(planned)}, took {format_time(took)} ({took / planned:.2f} x)"


def wrap_verdict(verdict: str) -> list[str]:
    """Return the lines of a verdict as they are printed."""
    first, *others = (part for line in verdict.splitlines() for part in textwrap.wrap(line, VERDICT_WIDTH))
    return [f"verdict {first}", *(f"        {line}" for line in others)]


def compare_seeds(configs: Mapping[str, RunConfig], runs: Mapping[str, tuple[str, Path | None]]) -> str:
    """Write one page for each group of runs that differ only in their seed. Return the verdicts and the paths as text.

    `configs` and `runs` have the configuration and (last stage, run folder or None) of each label of a multirun. A
    group needs two finished runs with PPO or DPO. Any error is logged as a warning.
    """
    groups: dict[str, list[str]] = {}
    for label, config in configs.items():
        same = config.model_copy(update={"seed": 0, "name": None, "run_dir": None}).model_dump_json()
        groups.setdefault(same, []).append(label)
    lines = []
    for labels in groups.values():
        finished = [run for label in labels if runs[label][0] in POLICIES and (run := runs[label][1]) is not None]
        if len(finished) < 2:
            continue
        try:
            from pipeline.report.seeds import write_seed_report

            path, verdict = write_seed_report(finished, [label for label in labels if runs[label][1] is None])
            lines += [f"-- {path.stem}"] if len(groups) > 1 else []
            lines += [*wrap_verdict(f"{verdict.headline}\n{verdict.evidence}"), f"report  {path}"]
        except Exception as problem:
            print(f"warning: no page over seeds: {type(problem).__name__}: {problem}", file=sys.stderr)
    return "\n".join(lines)


def compare_runs(runs: Mapping[str, tuple[str, Path | None]]) -> str:
    """Return a table of the runs of a multirun: one line per run with its label and the metrics of its last stage.

    `runs` maps each label to (last stage, run folder). The folder is None if the run failed.
    """
    stages, width = list(dict.fromkeys(stage for stage, _ in runs.values())), max(map(len, runs))
    lines = [f"-- {' and '.join(stages)} of {len(runs)} runs"]
    for label, (stage, run) in runs.items():
        text = "failed" if run is None else stage_figures(run, stage) or ""
        lines.append(f"{label:<{width}}  {text}".rstrip())
    return "\n".join(lines)


def stage_figures(run_dir: Path, stage: str) -> str | None:
    """Return the main metrics of a finished stage in one line; None if the stage has no summary.json."""
    summary = read_object(run_dir / stage / "summary.json")
    if not summary:
        return None
    values = ((name, figure(summary, name)) for name in STAGES[stage].closing)
    return "  ".join(f"{name} {value:.4g}" for name, value in values if value is not None)


def figure(summary: dict[str, Any], name: str) -> float | None:
    """Return one metric of summary.json: from its top level, else from "final"; None if neither has it."""
    value = summary_metrics(summary).get(name)
    return value if isinstance(value, int | float) else None


def evaluation_notice(config: RunConfig, stage_dir: Path, changed: Sequence[str]) -> str:
    """Return a notice that a finished stage was evaluated in another way than this command configures; "" if not.

    changed: the keys of judges whose files have changed since the stage started
    The notice explains how to evaluate PPO or DPO without training it again. The models of SFT and the reward model are
    inputs of later stages, and adapters that another device merges may round differently, so these models stay.
    """
    stage = stage_dir.name
    judges = ["evaluation.judge", "evaluation.pair_judge"] if stage in POLICIES else []
    notices = changed_evaluation(config, stage_dir, *judges)
    notices += [f"the file of {key} changed" for key in judges if key in changed]
    if not notices:
        return ""
    remedy = "the stage keeps its earlier evaluation"
    if stage in POLICIES and has_checkpoints(stage_dir):
        remedy = (
            f"delete {stage_dir / 'model'} and run the same command again, which exports the model from the last "
            "checkpoint and evaluates it"
        )
    return f"; {'; '.join(notices)}: {remedy}"


def changed_evaluation(config: RunConfig, stage_dir: Path, *more: str) -> list[str]:
    """Return how the settings of an evaluation, and `more` keys, differ from those of a stage's last start.

    The list has one text per key. The sampling of PPO is an input of the stage, so it never differs in a stage that is
    skipped or resumed.
    """
    stage, recorded, now = stage_dir.name, read_settings(stage_dir), config.model_dump(mode="json")
    keys = [*more, *[f"{stage}.eval_examples"] * (stage in ("reward", "dpo"))]
    if stage in ANSWERING:
        keys += ["evaluation.prompts", "evaluation.temperatures", *["evaluation.best_of"] * (stage == "ppo")]
        keys += [f"rollout.{key}" for key in now["rollout"] if key not in ROLLOUT_EXECUTION_KEYS]
    old, new = ({key: value for key, value in flatten(each).items() if key in keys} for each in (recorded, now))
    return [f"{key} was {value}, is {new[key]}" for key, value in old.items() if value != new[key]]


def report_verdict(run_dir: Path) -> str | None:
    """Write report.html if the manifest is newer, and return the verdict. Any error is logged as a warning."""
    try:
        from pipeline.report.report import write_report
        from pipeline.report.verdict import conclusion

        report, manifest = run_dir / "report.html", run_dir / "manifest.json"
        if not report.exists() or report.stat().st_mtime_ns < manifest.stat().st_mtime_ns:
            write_report(run_dir)
        return conclusion(run_dir)
    except Exception as problem:
        print(f"warning: report.html could not be written: {type(problem).__name__}: {problem}", file=sys.stderr)
        return None
