"""The folder of one stage while it runs: metrics, checkpoints, the summary, and where a killed run goes on.

    folder/metrics.jsonl, checkpoints/step-N/, summary.json, model/

Step numbers count finished steps, from 1. `seconds` and `tokens` count from the stage's first step, over all starts.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from engine import Engine, checkpoint, distributed, oom
from pipeline.config.schema import ProfileSection, StageSection
from pipeline.errors import SharedError, UserError
from pipeline.files import explained_disk, write_json
from pipeline.stages.checkpoints import Checkpoints
from pipeline.stages.memory_limits import read_limits, restart, write_limits
from pipeline.stages.stop_signals import Stopped, put_off
from pipeline.tracking import metrics
from pipeline.tracking.clock import Clock
from pipeline.tracking.memory import measured_memory, peak_memory
from pipeline.tracking.profile import Profile
from pipeline.tracking.watchers import Watcher

METRICS = "metrics.jsonl"
NORMS = ("grad_norm", "critic_grad_norm")  # which a skipped step has none of: skipped_steps counts it
SECONDS_BETWEEN_SAVES = 15 * 60.0  # at most, where save_every leaves it to us: a job with a time limit has to get on


class StageRun:
    """One stage's progress. Every rank makes one; rank 0 writes.

    `frozen` engines only score. `extra` gives the stage's own state for a checkpoint (JSON), `take` puts it back.
    `longest` is the number of tokens of the smallest micro-batch there is: one sequence (or pair), the longest one.
    `decides` names the held-out figure that `export=best` goes by; the checkpoint of its best step stays to the end.
    """

    def __init__(
        self,
        folder: Path,
        section: StageSection,
        steps: int,
        engines: Mapping[str, Engine],
        *,
        watchers: list[Watcher] | None = None,
        frozen: Mapping[str, Engine] | None = None,
        longest: int = 1,
        profile: ProfileSection | None = None,
        decides: str | None = None,
        extra: Callable[[], dict[str, Any]] = dict,
        take: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.folder, self.steps = folder, steps
        self.clock = Clock()
        self.predicted: Mapping[str, Mapping[str, int]] = {}
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.budget = section.micro_batch_tokens
        self._section, self._watchers, self._longest = section, watchers or [], longest
        self._extra, self._take = extra, take
        self._checkpoints = Checkpoints(folder, engines, newest=section.keep_checkpoints)
        self._engines = {**engines, **(frozen or {})}
        self._save_every = section.save_every or max(1, math.ceil(steps / 10))
        self._seconds_before = 0.0
        self._began = time.monotonic()
        self._saved: int | None = None
        self._saved_at = self._began
        self._decides = decides if section.export == "best" else None
        self._best_step: int | None = None
        self._begun = 0  # the step before this process's first
        self._sent = distributed.bytes_sent()
        self._profile = _profile_of(folder, profile)

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    def restore(self) -> int:
        """Go back to the newest checkpoint that is as it was written. Returns the number of steps already done.

        Raises UserError where there are checkpoints and all of them are damaged.
        """
        loaded = self._checkpoints.load_newest()
        step = 0
        if loaded is not None:
            shared, mine = loaded
            step = self._saved = shared["step"]
            self._seconds_before = shared["seconds"]
            self.clock.seconds, self.clock.tokens = shared["phases"], shared["tokens"]
            self.best, self.last = shared["best"], shared["last"]
            self._best_step = shared.get("best_step")
            if mine is not None:
                checkpoint.restore_random_state(mine["random"])
            self._take(shared["extra"])
        self.clock.begin_lap()
        self._begun, self._sent = step, distributed.bytes_sent()
        if distributed.world().is_rank_zero:
            if step:
                print(f"{self.folder.name}: continuing after step {step} of {self.steps}", flush=True)
            metrics.cut(self.folder / METRICS, step)
            self._checkpoints.remove_incomplete()
        distributed.barrier()
        self._began = self._saved_at = time.monotonic()
        return step

    def find_micro_batch_size(self, dry_run: Callable[[int], None]) -> None:
        """On GPUs, find the micro-batch size that fits: `budget`.

        `dry_run` runs forward and backward of the largest micro-batch of so many tokens. A host has no such limit: it
        swaps, or the kernel ends a process.
        """
        if distributed.world().device.type != "cuda":
            return
        with self.clock.phase("dry_run"):
            fits = oom.find_micro_batch_size(dry_run, self.budget, minimum=self._longest)
        if fits < self.budget:
            self.budget = fits
            write_limits(self.folder, replace(read_limits(self.folder), micro_batch_tokens=fits))
            name = self.folder.name
            print(f"{name}: a dry run found that {name}.micro_batch_tokens={fits} fits, and no more", flush=True)

    def steps_left(self) -> Iterator[int]:
        """The steps that are not done yet, counted from 1; those of `profile.steps` are recorded.

        A signal to stop waits for the end of a step, where `save` sees to it.
        """
        if self._profile is not None:
            self._profile.expect(self._begun + 1, self.steps)
        with put_off(distributed.request_stop):
            for step in range(self._begun + 1, self.steps + 1):
                if self._profile is not None:
                    self._profile.begin(step)
                yield step
                if self._profile is not None:
                    self._profile.end(step, final=step == self.steps)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write one step's figures. The caller passes the same on every rank; rank 0 writes."""
        line: dict[str, float] = {"step": step, "seconds": round(self.seconds, 3), "tokens": self.clock.tokens}
        line.update({name: value for name, value in figures.items() if name not in NORMS or math.isfinite(value)})
        self.last.update(line)
        if not distributed.world().is_rank_zero:
            return
        if step % self._section.log_every == 0 or step == self.steps or step == 1:
            metrics.append(self.folder / METRICS, line)
            for watcher in self._watchers:
                watcher.log(step, line)

    def note_best(self, step: int, name: str, value: float, *, higher: bool) -> None:
        """Keep the best value of a figure; of equal ones the earliest. What is not a number is no value."""
        before = self.best.get(name, -math.inf if higher else math.inf)
        if value > before if higher else value < before:
            self.best[name] = value
            if name == self._decides:
                self._best_step = step

    def evaluates(self, step: int) -> bool:
        """Whether held-out figures are due after this step."""
        every = self._section.eval_every
        return step == self.steps or (every > 0 and step % every == 0)

    def save(self, step: int) -> None:
        """Write a checkpoint where one is due: every `save_every` steps, after the last and after the best so far.

        Where `save_every` is 0, every tenth of the stage, and wherever the last one is too long ago. If the run is to
        stop, which all ranks learned in the step's updates, one is due as well; when it is whole, Stopped is raised.
        """
        stops = distributed.stop_requested()
        regular = step > 0 and (step % self._save_every == 0 or self._overdue(step))
        if step != self._saved and (stops or regular or step in (self.steps, self._best_step)):
            self._write(step)
        if stops:
            self.settle()
            if distributed.world().is_rank_zero:
                print(f"{self.folder.name}: step {step} of {self.steps} is saved", flush=True)
            raise Stopped

    def _write(self, step: int) -> None:
        """Begin to write the checkpoint of a step."""
        shared = {
            "step": step,
            "tokens": self.clock.tokens,
            "seconds": self.seconds,
            "phases": self.clock.seconds,
            "best": self.best,
            "last": self.last,
            "best_step": self._best_step,
            "extra": self._extra(),
        }
        with self.clock.phase("save"):
            self._checkpoints.save(step, shared, {"random": checkpoint.random_state()}, keep=self._best_step)
        self._saved, self._saved_at = step, time.monotonic()

    def _overdue(self, step: int) -> bool:
        """Whether the last checkpoint is long ago, by the leading rank's clock; asked a hundred times between two."""
        if self._section.save_every or step % math.ceil(self._save_every / 100):
            return False
        return bool(distributed.broadcast_object(time.monotonic() - self._saved_at > SECONDS_BETWEEN_SAVES))

    def settle(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self._checkpoints.wait()

    def __enter__(self) -> "StageRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, _: object) -> None:
        if kind is None or issubclass(kind, SharedError | Stopped):
            self.settle()
        elif isinstance(problem, oom.PassOutOfMemory):
            raise restart(self.folder, problem, tokens=self.budget, longest=self._longest) from problem

    def take_best(self) -> None:
        """Before the export: give the models back the values they had after the best step, where `export=best`.

        Every rank calls. Raises UserError where the checkpoint of that step is damaged.
        """
        if self._best_step is None or self._best_step == self.steps:
            return
        self.settle()
        place = self._checkpoints.path(self._best_step)
        told = f"step {self._best_step} of {self.steps}, the best by {self._decides}"
        if not distributed.broadcast_object(place.is_dir()):
            told = f"the last step: the checkpoint of {told}, is gone"
            self._best_step = None
        else:
            try:
                self._checkpoints.load(place)
            except checkpoint.Damaged as problem:
                raise UserError(
                    f"{place} is damaged ({problem.reason}); it has {told}. Put a sound copy back; or delete it, and "
                    "the same command exports the last step"
                ) from problem
        if distributed.world().is_rank_zero:
            print(f"{self.folder.name}: exports {told}", flush=True)

    def require_finite(self, step: int, loss: float, batch: Any) -> None:
        """Stop on a loss that is not a number, with this rank's batch (lists, tensors) saved as JSON for inspection."""
        if math.isfinite(loss):
            return
        path = self.folder / f"nan-step-{step}-rank-{distributed.world().rank}.json"
        path.write_text(json.dumps(batch, default=Tensor.tolist))
        raise SharedError(
            f"the loss is {loss} at step {step}; the batch is in {path}. Lower the learning rate, or use "
            "engine.dtype=bf16 or fp32; the last checkpoint is whole, the same command continues from it"
        )

    def _bytes_sent_by_step(self) -> dict[str, int]:
        """Mean bytes that this rank sends in a step, by what for; rollouts, scoring and evaluation are part of it."""
        steps = max(1, self.steps - self._begun)
        return {kind: round(size / steps) for kind, size in asdict(distributed.bytes_sent() - self._sent).items()}

    def finish(self, figures: Mapping[str, Any]) -> None:
        """Write summary.json: final and best figures, peak memory by rank, seconds by phase, tokens a second."""
        memory = distributed.gather_objects(peak_memory())
        if distributed.world().is_rank_zero:
            for engine in self._engines.values():
                if engine.step_count and engine.scaler.skipped == engine.step_count:
                    print(f"warning: {self.folder.name}: {_unlearned(engine)}", file=sys.stderr, flush=True)
            summary = {
                "stage": self.folder.name,
                "steps": self.steps,
                "seconds": round(self.seconds, 3),
                "seconds_by_phase": {k: round(v, 3) for k, v in self.clock.seconds.items()},
                "tokens": self.clock.tokens,
                "tokens_per_second": self.clock.rate(),
                "peak_memory_by_rank": memory,
                "bytes_sent_by_step": self._bytes_sent_by_step(),
                "out_of_memory": {
                    "restarts": read_limits(self.folder).restarts,
                    "micro_batch_tokens": self.budget,
                },
                "memory": {"predicted": self.predicted, "measured": measured_memory(self._engines)},
                "final": {k: metrics.plain(v) for k, v in self.last.items()},
                "best": self.best,
                "exported_step": self.steps if self._best_step is None else self._best_step,
                **({self._decides: self.best[self._decides]} if self._decides and self._best_step is not None else {}),
                **figures,
            }
            with explained_disk(self.folder):
                write_json(self.folder / "summary.json", summary)
        distributed.barrier()


def _unlearned(engine: Engine) -> str:
    """What is said of a model none of whose steps was taken."""
    said = f"all {engine.step_count} steps were skipped, no gradient was finite: the model is as it was"
    if not engine.scaler.moves:
        return said
    return (
        f"{said}. More steps bring fp16's loss scale down further than {engine.scaler.scale:g}; "
        "engine.loss_scale_power= (in a DeepSpeed file fp16.initial_scale_power) begins lower, engine.dtype=bf16 needs "
        "none"
    )


def _profile_of(folder: Path, section: ProfileSection | None) -> Profile | None:
    """What records this rank's steps, where that is wanted."""
    if section is None or section.steps is None or (section.ranks == "first" and not distributed.world().is_rank_zero):
        return None
    first, last = section.steps
    return Profile(folder, first, last)
