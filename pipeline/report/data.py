"""Read a run folder for the report. Stages may be missing or unfinished, and files may end within a line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config.stages import ANSWERING, METHODS, POLICIES, STAGES
from pipeline.evaluation.samples import BEST_OF, GRADES, SAMPLES, Sample, StepGrades, read_grades, read_samples
from pipeline.files import json_lines, read_object, read_plan, read_settings, summary_metrics
from pipeline.report.svg import Point

METRICS, SUMMARY, CONFIG, MANIFEST = "metrics.jsonl", "summary.json", "config.yaml", "manifest.json"
ROLLOUTS, CARD = "rollouts.jsonl", "card.json"
SHOWN_MODELS = ("base", "sft", BEST_OF, *POLICIES)
"""The models that answer held-out prompts, in display order. "sft" is the model that PPO and DPO start from."""


@dataclass(frozen=True)
class StageReading:
    """The files that one stage has written so far.

    rows: the numeric metrics of each step
    planned: the settings that engine=auto chose, with its predictions
    grades: the grades of every evaluation
    card: the report card of the reward model
    folder: the folder of the stage; None if there is none
    """

    name: str
    rows: Sequence[Mapping[str, float]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    config: str = ""
    planned: Mapping[str, Any] = field(default_factory=dict)
    grades: Sequence[StepGrades] = ()
    card: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def started(self) -> bool:
        return bool(self.rows or self.summary)

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def guard(self) -> Mapping[str, Any]:
        """Return what the training guard wrote to the summary; empty without a guard."""
        return self.summary.get("guard") or {}

    @cached_property
    def rollouts(self) -> Sequence[tuple[float, float, float]]:
        """Return (step, score, KL) of the logged answers that have these numbers.

        They are read at the first use: rollouts.jsonl may have gigabytes, and the verdict does not need it.
        """
        return [] if self.folder is None else _read_rollouts(self.folder / ROLLOUTS)

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else int(self.number("steps") or 0)

    def series(self, key: str) -> list[Point]:
        """Return (step, value) for each step that logged `key`. Values may be nan or infinite."""
        return [(row["step"], row[key]) for row in self.rows if key in row]

    def number(self, key: str) -> float | None:
        """Return a finite metric of the summary, from its top level or from `final`; else None."""
        value = summary_metrics(self.summary).get(key)
        return None if value is None or not math.isfinite(value) else float(value)


@dataclass(frozen=True)
class RunReading:
    """A run folder: its name, its stages, the settings they share, and the manifest."""

    name: str
    stages: Mapping[str, StageReading]
    settings: Mapping[str, Any]
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def stage(self, name: str) -> StageReading:
        return self.stages.get(name) or StageReading(name)

    def setting(self, *path: str) -> Any:
        """Return one value of the newest stage's configuration; None if it is missing."""
        value: Any = self.settings
        for key in path:
            value = (value or {}).get(key)
        return value

    @property
    def rewarder(self) -> str:
        """Return what PPO learns from: "reward model", "reward function", "reward" for both, or "teacher"."""
        if self.setting("ppo", "advantage") == "distill":
            return "teacher"
        if not self.setting("ppo", "reward_function"):
            return "reward model"
        return "reward function" if self.setting("ppo", "reward_model") is False else "reward"

    @property
    def judge(self) -> str:
        """Return the judge as FILE.py:NAME without folders; "" for the built-in gold scorer."""
        return str(self.setting("evaluation", "judge") or "").rpartition("/")[2]

    @property
    def policy(self) -> str:
        """Return the stage whose model is compared with SFT's: "ppo" or "dpo", whichever finished last."""
        order = [name for name in POLICIES if name in self.stages]
        records = self.manifest.get("stages", {})
        ends = {name: records.get(name, {}).get("finished", "") for name in order}
        if order:
            return max(order, key=lambda name: (self.stage(name).finished, ends[name], self.stage(name).started))
        method = self.setting("method")
        return METHODS[method][-1] if method in METHODS else "ppo"

    @property
    def trained_again(self) -> list[str]:
        """Return the titles of the stages that have trained their models again since `policy` started from these."""
        records = self.manifest.get("stages", {})
        used = records.get(self.policy, {}).get("consumed", {}).get("models", {})
        # Of each role: the stage that trains its model, and the key that selects another model.
        stages = {"actor": ("sft", "actor"), "reward": ("reward", "reward_path")}
        made = {role: records.get(stage, {}).get("produced", {}).get("model") for role, (stage, _) in stages.items()}
        return [
            STAGES[stage].title
            for role, (stage, key) in stages.items()
            if role in used and made[role] not in (None, used[role]) and self.setting(key) is None
        ]

    @property
    def labels(self) -> Mapping[str, str]:
        """Return the display names of the models in `SHOWN_MODELS`.

        The model "sft" has the name of the SFT stage, or that of the stage or folder that `actor` names.
        """
        titles = {stage: STAGES[stage].title for stage in ANSWERING}
        start, actor = titles["sft"], Path(str(self.setting("actor") or "sft"))
        folder = actor.parent.name if actor.name == "model" else actor.name
        if folder != "sft":
            start = f"earlier {titles[folder]}" if folder == self.policy else titles.get(folder, folder)
        best_of = f"{start}, best of {self.best_of}"
        return {"base": "Base", "sft": start, BEST_OF: best_of, **{policy: titles[policy] for policy in POLICIES}}

    @property
    def best_of(self) -> str:
        """Return of how many SFT answers the reward model selected the best one; "n" if this is unknown."""
        return str(self.setting("evaluation", "best_of") or "n")

    @property
    def temperatures(self) -> list[float]:
        """Return the temperatures of the held-out answers. The first is that of the curves."""
        return list(self._samples)

    def samples(self, temperature: float) -> Sequence[Sample]:
        """Return the held-out answers at a temperature of the compared policy, else of the latest stage with answers.

        Answers of the other policy to the same prompts are added.
        """
        return self._samples.get(temperature, [])

    @cached_property
    def _samples(self) -> Mapping[float, Sequence[Sample]]:
        order = [self.policy, *reversed(STAGES)]
        stage = next((name for name in order if self.stage(name).samples), self.policy)
        others = {sample.key: sample for name in POLICIES if name != stage for sample in self.stage(name).samples}
        by_temperature: dict[float, list[Sample]] = {}
        for sample in self.stage(stage).samples:
            by_temperature.setdefault(sample.temperature, []).append(sample.merge(others.get(sample.key)))
        return by_temperature


def read_run(run_dir: Path) -> RunReading:
    """Read a run folder. Missing, incomplete or malformed files are treated as empty."""
    stages = {name: _read_stage(run_dir / name, name) for name in STAGES if (run_dir / name).is_dir()}
    newest = next((name for name in reversed(STAGES) if name in stages and stages[name].config), None)
    return RunReading(
        name=run_dir.resolve().name,
        stages=stages,
        settings={} if newest is None else read_settings(run_dir / newest),
        manifest=read_object(run_dir / MANIFEST),
    )


def _read_stage(folder: Path, name: str) -> StageReading:
    return StageReading(
        name=name,
        rows=_read_metrics(folder / METRICS),
        summary=read_object(folder / SUMMARY),
        samples=read_samples(folder / SAMPLES),
        config=_read_text(folder / CONFIG),
        planned=read_plan(folder),
        grades=read_grades(folder / GRADES),
        card=read_object(folder / CARD),
        folder=folder,
    )


def _read_rollouts(path: Path) -> list[tuple[float, float, float]]:
    """Return (step, score, KL) of the answers in rollouts.jsonl that have these numbers."""
    rows = (row for row in json_lines(path) if {"step", "score", "kl"} <= row.keys())
    numbers = [(row["step"], row["score"], row["kl"]) for row in rows]
    return [each for each in numbers if all(map(math.isfinite, each))]


def _read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the numbers of each step. A line that a killed run left incomplete is left out."""
    steps = []
    for row in json_lines(path):
        # JSON has no NaN, so a metric that was not finite is null. A sentence of the guard is a string.
        numbers = {
            key: math.nan if value is None else float(value) for key, value in row.items() if not isinstance(value, str)
        }
        if "step" in numbers:
            steps.append(numbers)
    return steps


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
