"""The closing words of a run: where the model is, the figures that matter, what to type next."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.stages import STAGES
from pipeline.installation import CHAT
from pipeline.launch.fingerprint import flat
from pipeline.launch.manifest import Manifest


def closing_words(run_dir: Path, verdict: str | None = None) -> str:
    """A line for each finished stage with its figures, the verdict, where the model is and how to talk to it."""
    found = {stage: figures for stage in STAGES if (figures := stage_figures(run_dir, stage)) is not None}
    lines = [f"{stage:<7} {figures}".rstrip() for stage, figures in found.items()]
    newest = next((stage for stage in Manifest.read(run_dir).answering() if stage in found), "reward")
    if verdict is not None:
        lines.append(f"verdict {verdict}")
    lines.append(f"model   {run_dir / newest / 'model'}")
    if (run_dir / "report.html").exists():
        lines.append(f"report  {run_dir / 'report.html'}")
    if newest != "reward":
        lines.append(f"talk    {CHAT} {shlex.quote(str(run_dir))}")
    return "\n".join(lines)


def comparing_words(runs: Mapping[str, tuple[str, Path | None]]) -> str:
    """What came out of a multirun: a line for each run, by label, with the figures of its last stage. A run is (that
    stage, its folder), None for one that failed.
    """
    stages, width = list(dict.fromkeys(stage for stage, _ in runs.values())), max(map(len, runs))
    lines = [f"-- {' and '.join(stages)} of {len(runs)} runs"]
    for label, (stage, run) in runs.items():
        figures = "failed" if run is None else stage_figures(run, stage) or ""
        lines.append(f"{label:<{width}}  {figures}".rstrip())
    return "\n".join(lines)


def stage_figures(run_dir: Path, stage: str) -> str | None:
    """The figures of a finished stage that matter, in a line; None where it is not there."""
    summary = read_summary(run_dir / stage)
    if summary is None:
        return None
    values = ((name, figure(summary, name)) for name in STAGES[stage].closing)
    return "  ".join(f"{name} {value:.4g}" for name, value in values if value is not None)


def read_summary(stage_dir: Path) -> dict[str, Any] | None:
    """summary.json of a stage, or None."""
    try:
        summary = json.loads((stage_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def figure(summary: dict[str, Any], name: str) -> float | None:
    """A final figure by its name, at the top of summary.json or under "final"."""
    final = summary.get("final")
    for place in (summary, final if isinstance(final, dict) else {}):
        if isinstance(place.get(name), int | float):
            return float(place[name])
    return next((float(value) for key, value in flat(summary).items() if key == f"evaluation.{name}"), None)
