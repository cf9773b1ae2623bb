"""The folder of one stage while it runs: metrics, checkpoints, the summary, and where a killed run goes on.

    folder/metrics.jsonl, checkpoints/step-N/, summary.json, model/

Step numbers count finished steps, from 1. `seconds` and `tokens` count from the stage's first step, over all starts.
"""

import errno
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from engine import Checkpointer, Engine
from engine.checkpoint import complete, random_state, restore_random_state
from engine.parallel import dist, traffic
from pipeline.config.schema import StageSection
from pipeline.errors import UserError

Metrics = dict[str, float]
FULL_DISK_BYTES = 2**20  # what is left on a disk that torch's writer found full, which it says in words of its own
RESTING = ("parameters", "optimizer")  # owners of what is held between steps
WORK = ("flip", "generate", "score", "train")  # the phases that are the stage's work; evaluating and saving are not


class Watcher(Protocol):
    """Whoever follows a stage: wandb, a progress bar."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


class StageRun:
    """One stage's progress. Every rank makes one; rank 0 writes.

    `frozen` engines only score. `extra` gives the stage's own state for a checkpoint (JSON), `take` puts it back.
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
        extra: Callable[[], dict[str, Any]] = dict,
        take: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.folder, self.steps = folder, steps
        self.phases: dict[str, float] = {}
        self.tokens = 0
        self.predicted: Mapping[str, Mapping[str, int]] = {}
        self.best: Metrics = {}
        self.last: Metrics = {}
        self._section, self._watchers = section, watchers or []
        self._extra, self._take = extra, take
        self._checkpointer = Checkpointer(engines)
        self._engines = {**engines, **(frozen or {})}
        self._save_every = section.save_every or max(1, math.ceil(steps / 10))
        self._seconds_before = 0.0
        self._began = time.monotonic()
        self._saved = 0
        self._lap: Metrics = {}
        self._lap_tokens = 0
        self._begun = 0  # the step before this process's first
        self._sent = traffic.sent()

    @property
    def budget(self) -> int:
        """Tokens a micro-batch: what the configuration says, or less where that did not fit in this run."""
        return within_limits(self._section.micro_batch_tokens, self._engines.values())

    @property
    def healing(self) -> dict[str, int]:
        """How often memory ran out and a step was done again, and the micro-batch that the stage came down to."""
        times = sum(engine.healer.times for engine in self._engines.values())
        return {"times": times, "micro_batch_tokens": self.budget}

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    def restore(self) -> int:
        """Go back to the newest whole checkpoint. Returns the number of steps already done."""
        found = dist.broadcast_object([str(p) for p in complete(self.folder / "checkpoints")])
        step = 0
        if found:
            shared, mine = self._checkpointer.load(Path(found[-1]))
            step = self._saved = shared["step"]
            self.tokens, self._seconds_before = shared["tokens"], shared["seconds"]
            self.phases, self.best, self.last = shared["phases"], shared["best"], shared["last"]
            if mine is not None:
                restore_random_state(mine["random"])
            self._take(shared["extra"])
            for name, (limit, times) in shared["healing"].items():
                self._engines[name].healer.limit, self._engines[name].healer.times = limit, times
        self._lap, self._lap_tokens = dict(self.phases), self.tokens
        self._begun, self._sent = step, traffic.sent()
        if dist.world().leads:
            if step:
                print(f"{self.folder.name}: continuing after step {step} of {self.steps}", flush=True)
            _cut_metrics(self.folder / "metrics.jsonl", step)
            _drop_halves(self.folder / "checkpoints")
        dist.barrier()
        self._began = time.monotonic()
        return step

    def rehearse(self, work: Callable[[], None]) -> None:
        """Run the largest micro-batch to come, on GPUs: there what fits at the start then fits at the end.

        A host has no such limit to run into: it swaps, or the kernel ends a process.
        """
        if dist.world().device.type == "cuda":
            with self.phase("rehearse"):
                work()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the wall time of a block under a name of `seconds_by_phase`."""
        began = time.monotonic()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - began

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count some seconds of one phase under another name."""
        self.phases[source] = self.phases.get(source, 0.0) - seconds
        self.phases[target] = self.phases.get(target, 0.0) + seconds

    def lap(self) -> Metrics:
        """Seconds by phase since the last lap, as `NAME_seconds`, and tokens a second over them."""
        spent = {name: total - self._lap.get(name, 0.0) for name, total in self.phases.items()}
        tokens, self._lap_tokens = self.tokens - self._lap_tokens, self.tokens
        self._lap = dict(self.phases)
        working = sum(seconds for name, seconds in spent.items() if name in WORK)
        return {f"{name}_seconds": round(s, 4) for name, s in spent.items() if name in WORK} | {
            "tokens_per_second": round(tokens / max(working, 1e-9), 1)
        }

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's figures. The caller passes the same on every rank; rank 0 writes."""
        line: Metrics = {"step": step, "seconds": round(self.seconds, 3), "tokens": self.tokens, **metrics}
        self.last.update(line)
        if not dist.world().leads:
            return
        if step % self._section.log_every == 0 or step == self.steps or step == 1:
            with explained_disk(self.folder), (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({k: _plain(v) for k, v in line.items()}) + "\n")
            for watcher in self._watchers:
                watcher.log(step, line)

    def note_best(self, name: str, value: float, *, higher: bool) -> None:
        """Keep the best value of a figure."""
        before = self.best.get(name)
        if before is None or (value > before if higher else value < before):
            self.best[name] = value

    def evaluates(self, step: int) -> bool:
        """Whether held-out figures are due after this step."""
        every = self._section.eval_every
        return step == self.steps or (every > 0 and step % every == 0)

    def save(self, step: int) -> None:
        """Write a checkpoint where one is due: every `save_every` steps and after the last."""
        if step == self._saved or (step % self._save_every and step != self.steps):
            return
        shared = {
            "step": step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "phases": self.phases,
            "best": self.best,
            "last": self.last,
            "extra": self._extra(),
            "healing": {name: (e.healer.limit, e.healer.times) for name, e in self._engines.items()},
        }
        with self.phase("save"), explained_disk(self.folder):
            self._checkpointer.save(
                self.folder / "checkpoints" / f"step-{step}", shared, {"random": random_state()}
            )
        self._saved = step
        self._drop_old()

    def settle(self) -> None:
        """Wait until the last checkpoint is on disk."""
        with explained_disk(self.folder):
            self._checkpointer.wait()
        self._drop_old()

    def _drop_old(self) -> None:
        """Keep the newest checkpoints. The one being written is not whole yet, so the newest whole one always stays."""
        if dist.world().leads:
            for old in complete(self.folder / "checkpoints")[: -self._section.keep_checkpoints]:
                shutil.rmtree(old, ignore_errors=True)

    def __enter__(self) -> "StageRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.settle()

    def require_finite(self, step: int, loss: float, batch: Any) -> None:
        """Stop on a loss that is not a number, with this rank's batch saved as JSON for inspection."""
        if math.isfinite(loss):
            return
        path = self.folder / f"nan-step-{step}-rank-{dist.world().rank}.json"
        path.write_text(json.dumps(batch))
        self.settle()
        raise UserError(
            f"the loss is {loss} at step {step}; the batch is in {path}. Lower the learning rate, or use "
            "engine.dtype=bf16 or fp32; the last checkpoint is whole, the same command continues from it"
        )

    def _bytes_sent_by_step(self) -> dict[str, int]:
        """Mean bytes that this rank sends in a step, by what for; rollouts, scoring and evaluation are part of it."""
        steps = max(1, self.steps - self._begun)
        return {kind: round(size / steps) for kind, size in asdict(traffic.sent() - self._sent).items()}

    def finish(self, figures: Mapping[str, Any]) -> None:
        """Write summary.json: final and best figures, peak memory by rank, seconds by phase, tokens a second."""
        memory = dist.gather_objects(peak_memory())
        if dist.world().leads:
            seconds = self.seconds
            working = sum(v for k, v in self.phases.items() if k in WORK)
            summary = {
                "stage": self.folder.name,
                "steps": self.steps,
                "seconds": round(seconds, 3),
                "seconds_by_phase": {k: round(v, 3) for k, v in self.phases.items()},
                "tokens": self.tokens,
                "tokens_per_second": round(self.tokens / max(working, 1e-9), 1),
                "peak_memory_by_rank": memory,
                "bytes_sent_by_step": self._bytes_sent_by_step(),
                "healing": self.healing,
                "memory": {"predicted": self.predicted, "measured": measured_memory(self._engines)},
                "final": {k: _plain(v) for k, v in self.last.items()},
                "best": self.best,
                **figures,
            }
            with explained_disk(self.folder):
                write_json(self.folder / "summary.json", summary)
        dist.barrier()


def within_limits(tokens: int, engines: Iterable[Engine]) -> int:
    """Tokens a micro-batch, cut to what fits all of some engines as far as they found out."""
    limits = (engine.healer.limit for engine in engines)
    return min([tokens, *(limit for limit in limits if limit is not None)])


def measured_memory(engines: Mapping[str, Engine]) -> dict[str, dict[str, int]]:
    """This rank's bytes by owner at the height of each phase; beside a working engine the others rest.

    With one engine phases and owners are those of the prediction; with several a phase is "train actor", and what an
    engine keeps between steps has its name.
    """
    found: dict[str, dict[str, int]] = {}
    resting = {name: sum(engine.ledger.holdings().get(o, 0) for o in RESTING) for name, engine in engines.items()}
    for name, engine in engines.items():
        for phase, owners in engine.ledger.heights.items():
            if len(engines) == 1:
                found[phase] = dict(owners)
                continue
            working = {owner: count for owner, count in owners.items() if owner not in RESTING}
            label = phase if phase == "generate" else f"{phase} {name}"
            found[label] = resting | working
    return found


def peak_memory() -> dict[str, int]:
    """This rank's peak: bytes on the device (allocated by torch) and resident on the host."""
    world = dist.world()
    device = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux kilobytes.
    return {"rank": world.rank, "device_bytes": device, "host_bytes": peak * (1 if sys.platform == "darwin" else 1024)}


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    staging = path.with_name(path.name + ".tmp")
    staging.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(staging, path)


@contextmanager
def explained_disk(folder: Path) -> Iterator[None]:
    """Turn a full or broken disk into one clear message."""
    try:
        yield
    except OSError as error:
        full = error.errno == errno.ENOSPC or shutil.disk_usage(folder).free < FULL_DISK_BYTES
        what = "the disk is full" if full else f"writing failed ({error})"
        raise UserError(
            f"{folder}: {what}. The last whole checkpoint is kept; make room (or choose run_dir= on another disk, "
            "moving the run folder there), then the same command continues"
        ) from error


def _cut_metrics(path: Path, step: int) -> None:
    """Drop lines after `step`: steps that a killed run had logged and will do again. From step 0 all is done again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if 0 < step >= json.loads(line)["step"]:
                kept.append(line)
        except (json.JSONDecodeError, KeyError):
            continue
    staging = path.with_name(path.name + ".tmp")
    staging.write_text("".join(line + "\n" for line in kept))
    os.replace(staging, path)


def _drop_halves(folder: Path) -> None:
    for half in folder.glob("step-*.tmp"):
        shutil.rmtree(half, ignore_errors=True)


def _plain(value: float) -> float | int | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
