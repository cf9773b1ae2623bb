"""The watchers of a running stage: its trackers (`trackers.py`), and lines about its progress.

metrics.jsonl (`pipeline/tracking/metrics.py`) is the authoritative record.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from engine import distributed
from pipeline.config.messages import format_time
from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES, stages_to_run
from pipeline.evaluation.samples import SAMPLES, read_samples
from pipeline.files import read_object, read_plan
from pipeline.tracking.trackers import TensorBoard, Tracker, open_wandb, section_of

SECONDS_BETWEEN_LINES = 5.0


class Watcher(Protocol):
    """A receiver of a stage's metrics and of the training guard's sentences: wandb or a progress display."""

    def log(self, step: int, metrics: Mapping[str, float], note: str = "") -> None: ...


class ProgressDisplay:
    """The progress of a stage: a line with the main metrics every few seconds, at the first step and at the last."""

    def __init__(
        self,
        stage: str,
        steps: int,
        *,
        place: str = "",
        evaluations: float = 0.0,
        later: float | None = None,
    ) -> None:
        """`place` is "stage 2 of 3". The planned seconds of evaluations and of later stages count steps of this stage.

        `later` is None without a plan, or for a stage that runs alone.
        """
        self._stage, self._steps = stage, steps
        self._place = place and f" ({place})"
        self._evaluations, self._later = evaluations, later
        self._opened = time.monotonic()
        self._first: tuple[int, float, float] | None = None  # the first step, its tokens, and its time
        self._shown_at = -float("inf")

    def log(self, step: int, metrics: Mapping[str, float], note: str = "") -> None:
        """Show the metrics of one step, and print a sentence of the training guard. Each evaluation has a line."""
        shown = {name: metrics[name] for name in STAGES[self._stage].progress if name in metrics}
        has_evaluation = any(section_of(name) == "held_out" for name in shown)
        clock, tokens = time.monotonic(), metrics.get("tokens", 0)
        self._first = self._first or (step, tokens, clock)
        if has_evaluation and step > self._first[0]:
            self._evaluations = 0.0  # the seconds of a step include evaluations from now on
        if step >= self._steps or has_evaluation or clock - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._shown_at = clock
            done = f"{step}/{self._steps}" if step else "before its first step"
            figures = [f"{name} {value:.4g}" for name, value in shown.items() if value is not None]
            words = "  ".join(filter(None, (*figures, *self._outlook(step, tokens, clock))))
            print(f"{self._stage}{self._place} {done}  {words}", file=sys.stderr, flush=True)
        if note:
            print(f"{self._stage}: step {step}: {note}", file=sys.stderr, flush=True)

    def _outlook(self, step: int, tokens: float, clock: float) -> tuple[str, str]:
        """Return the tokens per second, and the time that the stage still needs with the expected end of the run."""
        assert self._first is not None
        first_step, first_tokens, began = self._first
        done, took = step - first_step, clock - began
        if done <= 0 or step >= self._steps:
            return "", ""
        evaluations = took / done * self._evaluations - (began - self._opened)  # less the one before the first step
        seconds = took / done * (self._steps - step) + max(evaluations, 0.0)
        left = f"{format_time(seconds)} left"
        speed = f"{(tokens - first_tokens) / took:,.0f} tokens/s" if tokens > first_tokens and took > 0 else ""
        if self._later is None:
            return speed, left
        remains = timedelta(seconds=seconds + took / done * self._later)
        day = "%a" if remains < timedelta(days=6) else "%d %b"  # later weeks have the same weekdays
        return speed, f"{left}, run ends about {datetime.now() + remains:{day} %H:%M}"


@contextmanager
def open_watchers(config: RunConfig, stage: str, folder: Path, steps: int) -> Iterator[list[Watcher]]:
    """Open the watchers of a stage: the trackers and the progress display on rank 0, none on other ranks.

    At the end of the stage, the trackers receive the table of held-out answers (samples.jsonl).
    """
    if not distributed.is_rank_zero():
        yield []
        return
    trackers: list[Tracker] = []
    if config.tracking.kind in ("wandb", "both") and (run := open_wandb(config, stage, folder)) is not None:
        trackers.append(run)
    if config.tracking.kind in ("tensorboard", "both"):
        trackers.append(TensorBoard(folder.parent, stage))
    progress = ProgressDisplay(stage, steps, **_outlook(config, stage, folder, steps))
    ended = False
    try:
        yield [*trackers, progress]
        columns, rows = sample_table(folder / SAMPLES)
        last = read_object(folder / "summary.json").get("steps", steps)
        for tracker in trackers if rows else ():
            tracker.table(last, "samples", columns, rows)
        ended = True
    finally:
        for tracker in trackers:
            tracker.finish(failed=not ended)


def _outlook(config: RunConfig, stage: str, folder: Path, steps: int) -> dict[str, Any]:
    """Return the arguments of `ProgressDisplay` that come from the run and from the plan of the stage."""
    stages, planned = stages_to_run(config), read_plan(folder)
    own, later, step = planned.get("stage_seconds"), planned.get("later_seconds"), planned.get("seconds")
    seconds = sum(step.values()) if step else 0.0
    outlook: dict[str, Any] = {"evaluations": max(own / seconds - steps, 0.0)} if own and seconds else {}
    if stage in stages and len(stages) > 1:
        outlook["place"] = f"stage {stages.index(stage) + 1} of {len(stages)}"
        outlook["later"] = later / seconds if seconds and later is not None else None
    return outlook


def sample_table(file: Path) -> tuple[list[str], list[list[Any]]]:
    """Return samples.jsonl as columns and rows: prompt, temperature, and the answer and scores of each model."""
    samples = read_samples(file)
    if not samples:
        return [], []
    names = list(dict.fromkeys(name for sample in samples for name in sample.answers))
    kinds = [kind for kind in ("scores", "function", "gold") if any(getattr(sample, kind) for sample in samples)]
    columns = ["prompt", "temperature", *names, *(f"{kind} {name}" for kind in kinds for name in names)]
    rows = []
    for sample in samples:
        prompt = "\n".join(f"{turn.role}: {turn.text}" for turn in sample.prompt)
        answers = [sample.answers.get(name, "") for name in names]
        figures = [getattr(sample, kind).get(name) for kind in kinds for name in names]
        rows.append([prompt, sample.temperature, *answers, *figures])
    return columns, rows
