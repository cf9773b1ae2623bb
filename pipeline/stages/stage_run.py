"""The folder of a running stage: metrics, checkpoints, the summary, and the step at which a run resumes.

    folder/metrics.jsonl, checkpoints/step-N/, summary.json, model/

Step numbers start at 1. `seconds` and `tokens` are totals since the first step of the stage, over all starts.
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
from engine.memory import bytes_per_trained_parameter
from pipeline import progress
from pipeline.config.schema import ProfileSection
from pipeline.config.stage_sections import StageSection
from pipeline.errors import SharedError, Stopped, UserError, delay_stop
from pipeline.files import explained_disk, sync, write_json
from pipeline.stages.restart import Checkpoints, read_limits, restart, write_limits
from pipeline.tracking import metrics
from pipeline.tracking.metrics import Clock, measured_memory, peak_memory
from pipeline.tracking.watchers import Watcher

METRICS = "metrics.jsonl"
NORMS = ("grad_norm", "critic_grad_norm")  # not finite in skipped steps, which skipped_steps counts
SECONDS_BETWEEN_SAVES = 15 * 60.0  # at most, if save_every is 0, so that jobs with a time limit make progress
LARGE = 2**30  # bytes of a checkpoint; ten of a larger one may take longer than the steps of a stage


class StageRun:
    """The progress of one stage. Every rank has one; rank 0 writes the files.

    engines: all models of the stage; those with an optimizer are trained, and checkpoints contain them
    extra: a function that returns the stage's own state for a checkpoint (JSON)
    restore_extra: a function that restores this state
    longest: tokens of the longest sequence (or pair), which is the smallest possible micro-batch
    best_metric: the metric that selects the best step; if the stage may export this step (`StageSection.selects_best`),
        its checkpoint is retained until the end
    """

    def __init__(
        self,
        folder: Path,
        section: StageSection,
        steps: int,
        engines: Mapping[str, Engine],
        *,
        watchers: list[Watcher] | None = None,
        longest: int = 1,
        profile: ProfileSection | None = None,
        best_metric: str | None = None,
        extra: Callable[[], dict[str, Any]] = dict,
        restore_extra: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.folder, self.steps = folder, steps
        self.last_step = steps  # lower if the stage is to end with an earlier step
        self.clock = Clock()
        self.predicted: Mapping[str, Mapping[str, int]] = {}
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.budget = section.micro_batch_tokens
        self._section, self._watchers, self._longest = section, watchers or [], longest
        self._extra, self._restore_extra = extra, restore_extra
        self._engines = engines
        self._trained = {name: engine for name, engine in engines.items() if engine.optimizer_config is not None}
        self.checkpoints = Checkpoints(folder, self._trained, newest=section.keep_checkpoints)
        self._save_every = section.save_every or (steps if self._is_large() else max(1, math.ceil(steps / 10)))
        self._seconds_before = 0.0
        self._began = time.monotonic()
        self._saved: int | None = None
        self._saved_at = self._began
        self._best_metric = best_metric if section.selects_best else None
        self.best_step: int | None = None
        self._exported_step: int | None = None  # set by `take_best`; None for the last step
        self._begun = 0  # the number of finished steps when this process started
        self._sent = distributed.bytes_sent()
        self._profile = profile or ProfileSection()
        self._earlier_memory: dict[str, dict[str, int]] = {}  # measured before this process started

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    def restore(self) -> int:
        """Load the newest undamaged checkpoint. Returns the number of finished steps.

        Raises UserError if there are checkpoints and all of them are damaged.
        """
        loaded = self.checkpoints.load_newest()
        step = 0
        if loaded is not None:
            shared, mine = loaded
            step = self._saved = shared["step"]
            self._seconds_before = shared["seconds"]
            self.clock.seconds, self.clock.tokens = shared["phases"], shared["tokens"]
            self.best, self.last = shared["best"], shared["last"]
            self.best_step = shared["best_step"]
            if mine is not None:
                checkpoint.restore_random_state(mine["random"])
                self._earlier_memory = mine.get("memory", {})
            self._restore_extra(shared["extra"])
        self.clock.begin_lap()
        self._begun, self._sent = step, distributed.bytes_sent()
        if distributed.is_rank_zero():
            if step:
                print(f"{self.folder.name}: resumes after step {step} of {self.steps}", flush=True)
            metrics.cut(self.folder / METRICS, step)
            self.checkpoints.remove_incomplete()
        distributed.barrier()
        self._began = self._saved_at = time.monotonic()
        return step

    def find_micro_batch_size(self, dry_run: Callable[[int], None]) -> None:
        """Find the micro-batch size that fits into the memory of the GPU, and set `budget` to it.

        `dry_run` runs forward and backward of the largest micro-batch of a number of tokens. Does nothing on CPUs,
        where the system swaps memory instead.
        """
        if distributed.world().device.type != "cuda":
            return
        with self.clock.phase("dry_run"):
            fits = oom.find_micro_batch_size(dry_run, self.budget, minimum=self._longest)
        if fits < self.budget:
            self.budget = fits
            write_limits(self.folder, replace(read_limits(self.folder), micro_batch_tokens=fits))
            name = self.folder.name
            print(f"{name}: uses {name}.micro_batch_tokens={fits}, the largest size that fits in a dry run", flush=True)

    def steps_left(self) -> Iterator[int]:
        """Yield the remaining step numbers, and record the steps of `profile.steps`.

        After a stop signal, `save` raises Stopped at the end of the step.
        """
        took: float | None = None
        planned = range(self._begun + 1, self.steps + 1)
        with delay_stop(distributed.request_stop):
            for step in metrics.profiled(planned, lambda step: step <= self.last_step, self.folder, self._profile):
                progress.own().begin_step(step, took)
                began = time.monotonic()
                yield step
                took = time.monotonic() - began
        progress.own().begin_step(0, took)

    def log(self, step: int, values: Mapping[str, float], note: str = "") -> None:
        """Write the metrics of a step. Every rank passes the same metrics; rank 0 writes.

        A note is written as the text `guard` of the line. Notes and evaluations are written at every step.
        """
        line: dict[str, float] = {"step": step, "seconds": round(self.seconds, 3), "tokens": self.clock.tokens}
        line.update({name: value for name, value in values.items() if name not in NORMS or math.isfinite(value)})
        self.last.update(line)
        if not distributed.is_rank_zero():
            return
        if step % self._section.log_every == 0 or step in (1, self.last_step) or self.evaluates(step) or note:
            metrics.append(self.folder / METRICS, {**line, "guard": note} if note else line)
            for watcher in self._watchers:
                watcher.log(step, line, note)

    def note_best(self, step: int, name: str, value: float, *, higher: bool) -> bool:
        """Record the value of a metric if it is the best so far, and return whether it is.

        Of equal values the first counts. NaN never counts.
        """
        before = self.best.get(name, -math.inf if higher else math.inf)
        is_best = value > before if higher else value < before
        if is_best:
            self.best[name] = value
            if name == self._best_metric:
                self.best_step = step
        return is_best

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation is due after this step."""
        every = self._section.eval_every
        return step == self.steps or (every > 0 and step % every == 0)

    def save(self, step: int) -> None:
        """Write a checkpoint if one is due: every `save_every` steps, after the last and after the best step.

        If `save_every` is 0, a checkpoint is due after `SECONDS_BETWEEN_SAVES`, and after each tenth of the stage if it
        has at most `LARGE` bytes. It is also due after a request to stop, which all ranks receive with the updates of
        the step. In this case Stopped is raised when the checkpoint is complete.
        """
        stops = distributed.stop_requested()
        regular = step > 0 and (step % self._save_every == 0 or self._overdue(step))
        if step != self._saved and (stops or regular or step in (self.last_step, self.best_step)):
            self._write(step)
        if stops:
            self.checkpoints.wait()
            if distributed.is_rank_zero():
                print(f"{self.folder.name}: step {step} of {self.steps} is saved", flush=True)
            raise Stopped

    def _write(self, step: int) -> None:
        """Start to write the checkpoint of a step."""
        shared = {
            "step": step,
            "tokens": self.clock.tokens,
            "seconds": self.seconds,
            "phases": self.clock.seconds,
            "best": self.best,
            "last": self.last,
            "best_step": self.best_step,
            "extra": self._extra(),
        }
        # The disk may need minutes for the checkpoint before this one, however short earlier visits of the phase were.
        with self.clock.phase("save"), progress.own().allow(progress.UNMEASURED):
            if distributed.is_rank_zero():
                with explained_disk(self.folder):  # a resumed run needs the log up to its checkpoint
                    sync(self.folder.glob("*.jsonl"))
            mine = {"random": checkpoint.random_state(), "memory": self._measured_memory()}
            self.checkpoints.save(step, shared, mine, keep=self.best_step)
        self._saved, self._saved_at = step, time.monotonic()

    def _overdue(self, step: int) -> bool:
        """Return whether the last checkpoint is too old by rank 0's clock. Checked in every tenth step at least."""
        if self._section.save_every or step % min(10, math.ceil(self.steps / 1000)):
            return False
        return bool(distributed.broadcast_object(time.monotonic() - self._saved_at > SECONDS_BETWEEN_SAVES))

    def _is_large(self) -> bool:
        """Return whether a checkpoint has more than LARGE bytes. Every rank calls; a pipeline rank has a part of it."""
        size = 0
        for engine in self._trained.values():
            trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
            config, optimizer = engine.config, engine.optimizer_config
            assert optimizer is not None
            size += trained * bytes_per_trained_parameter(config, optimizer, has_average=engine.average.runs)
        return distributed.max_over_ranks(float(size)) > LARGE

    def __enter__(self) -> "StageRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, _: object) -> None:
        if kind is None or issubclass(kind, SharedError | Stopped):
            self.checkpoints.wait()
        elif isinstance(problem, oom.PassOutOfMemory):
            raise restart(self.folder, problem, tokens=self.budget, longest=self._longest) from problem

    @property
    def exported_step(self) -> int:
        """The step whose weights the stage exports."""
        return self.last_step if self._exported_step is None else self._exported_step

    def take_best(self) -> None:
        """Load the models of the best step for the export. Does nothing if no step was recorded as the best.

        Every rank calls. Raises UserError if the checkpoint of that step is damaged.
        """
        if self.best_step in (None, self.last_step):
            self._exported_step = self.best_step
            return
        self.checkpoints.wait()
        path = self.checkpoints.path(self.best_step)
        exported = f"step {self.best_step} of {self.steps}, the best by {self._best_metric}"
        if not distributed.broadcast_object(path.is_dir()):
            exported = f"the last step, because the checkpoint of {exported}, is gone"
        else:
            try:
                self.checkpoints.load(path)
            except checkpoint.Damaged as problem:
                raise UserError(
                    f"{path}, the checkpoint of {exported}, is damaged ({problem.reason}). Restore a copy of it; or "
                    "delete it and run the same command again, which then exports the last step"
                ) from problem
            self._exported_step = self.best_step
        if distributed.is_rank_zero():
            print(f"{self.folder.name}: exports {exported}", flush=True)

    def require_finite(self, step: int, loss: float, batch: Any) -> None:
        """Raise SharedError if the loss is not finite. This rank's batch (lists, tensors) is saved as JSON."""
        if math.isfinite(loss):
            return
        path = self.folder / f"nan-step-{step}-rank-{distributed.world().rank}.json"
        path.write_text(json.dumps(batch, default=Tensor.tolist))
        raise SharedError(
            f"the loss is {loss} at step {step}; the batch is in {path}. Lower the learning rate, or use "
            "engine.dtype=bf16 or fp32, and run again with the same run folder (name= or run_dir=): the stage starts "
            "again"
        )

    def _bytes_sent_by_step(self) -> dict[str, int]:
        """Return the mean bytes that this rank sends per step, by purpose. Rollouts, scoring and evaluation count."""
        steps = max(1, self.last_step - self._begun)
        return {kind: round(size / steps) for kind, size in asdict(distributed.bytes_sent() - self._sent).items()}

    def _measured_memory(self) -> dict[str, dict[str, int]]:
        """Return this rank's peak bytes by phase and owner; of a phase that several starts ran, those of the last."""
        return self._earlier_memory | measured_memory(self._engines)

    def finish(self, metrics_of_stage: Mapping[str, Any]) -> None:
        """Write summary.json: `metrics_of_stage`, final and best metrics, peak memory by rank, seconds by phase."""
        memory = distributed.gather_objects(peak_memory())
        if distributed.is_rank_zero():
            for engine in self._engines.values():
                if engine.step_count and engine.scaler.skipped == engine.step_count:
                    print(
                        f"warning: {self.folder.name}: all {engine.step_count} steps were skipped because no gradient "
                        "was finite: the model did not change. With fp16, the loss scale falls with each skipped step: "
                        "take more steps, or use engine.dtype=bf16, which needs no loss scale",
                        file=sys.stderr,
                        flush=True,
                    )
            summary = {
                "stage": self.folder.name,
                "steps": self.last_step,
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
                "memory": {"predicted": self.predicted, "measured": self._measured_memory()},
                "final": {k: metrics.plain(v) for k, v in self.last.items()},
                "best": self.best,
                "exported_step": self.exported_step,
                **(
                    {self._best_metric: self.best[self._best_metric]}
                    if self._best_metric and self._exported_step is not None
                    else {}
                ),
                **metrics_of_stage,
            }
            with explained_disk(self.folder):
                write_json(self.folder / "summary.json", summary)
        distributed.barrier()
