"""The state that a stage stores for its next start.

- `STAGE/checkpoints/step-N`: checkpoints, written in the background. A restarted stage loads the newest one.
- `STAGE/out_of_memory.json`: memory limits. A stage whose pass runs out of memory writes smaller limits and ends with
  `RestartStage`. The launcher then starts the stage again. Delete the file to use the configured sizes again.
- `STAGE/rollbacks.json`: returns to an earlier step. A stage that rolls back removes its newer checkpoints, writes this
  file and ends with `RestartStage`. Each entry multiplies the learning rates by `ROLLBACK_LR`.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from engine import Checkpointer, Engine, checkpoint, distributed, oom
from pipeline import progress
from pipeline.config.schema import RunConfig
from pipeline.errors import RestartStage, UserError
from pipeline.files import explained_disk, read_record, write_json

LIMITS_FILE = "out_of_memory.json"
ROLLBACKS_FILE = "rollbacks.json"
ROLLBACK_LR = 0.3
STRICT = ConfigDict(extra="forbid")


class Checkpoints:
    """The checkpoints of one stage. Every rank calls every method.

    The newest `newest` checkpoints are retained, and one more checkpoint if `save` is called with `keep`.
    """

    def __init__(self, stage: Path, engines: Mapping[str, Engine], *, newest: int) -> None:
        self._stage, self._newest = stage, newest
        self._checkpointer = Checkpointer(engines)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, which may not exist."""
        return self._stage / "checkpoints" / f"step-{step}"

    def load(self, path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Load a checkpoint. Returns the values of all ranks and of this rank (`Checkpointer.load`).

        Raises Damaged, and UserError for a checkpoint of another model, optimizer or format.
        """
        try:
            return self._checkpointer.load(path)
        except ValueError as problem:
            raise UserError(str(problem)) from problem

    def load_newest(self) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
        """Load the newest undamaged checkpoint. Returns None if there is no checkpoint.

        Raises UserError if all checkpoints are damaged.
        """
        paths = [Path(path) for path in distributed.broadcast_object([str(p) for p in self._complete()])]
        damaged: dict[Path, str] = {}
        for path in reversed(paths):
            try:
                loaded = self.load(path)
            except checkpoint.Damaged as problem:
                damaged[path] = problem.reason
                continue
            if distributed.is_rank_zero():
                for folder, reason in damaged.items():
                    self._set_aside(folder, reason)
            return loaded
        if damaged:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
            raise UserError(
                f"all checkpoints in {self._stage / 'checkpoints'} are damaged ({reasons}). Put an undamaged copy "
                "back; or delete that folder and run the same command again to start the stage from the beginning"
            )
        return None

    def save(self, step: int, shared: dict[str, Any], mine: dict[str, Any], *, keep: int | None) -> None:
        """Start to write a checkpoint, with the values of all ranks and of this rank.

        When the checkpoint is complete, older checkpoints are removed, except the one of step `keep`.
        """
        with self._explained():
            self._checkpointer.save(self.path(step), shared, mine, then=partial(self._remove_old, keep=keep))

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""
        with self._explained(), progress.own().allow(progress.UNMEASURED):
            self._checkpointer.wait()

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, the newest first. Called on rank 0."""
        for folder in reversed(self._complete()):
            if int(folder.name.removeprefix("step-")) > step:
                self._remove(folder)

    def remove_incomplete(self) -> None:
        """Remove incomplete checkpoints."""
        for folder in (self._stage / "checkpoints").glob("step-*.tmp"):
            shutil.rmtree(folder, ignore_errors=True)

    def _complete(self) -> list[Path]:
        return checkpoint.complete(self._stage / "checkpoints")

    def _set_aside(self, damaged: Path, reason: str) -> None:
        """Rename a damaged checkpoint, for inspection."""
        renamed = damaged.with_name(f"{damaged.name}.damaged")
        shutil.rmtree(renamed, ignore_errors=True)
        damaged.rename(renamed)
        line = f"{damaged} is damaged ({reason}); renamed to {renamed.name}, an older checkpoint was loaded"
        print(f"{self._stage.name}: {line}", flush=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an OSError into a UserError, and remove the incomplete checkpoint."""
        try:
            with explained_disk(self._stage):
                yield
        except UserError:
            if distributed.is_rank_zero():
                self.remove_incomplete()
            raise

    def _remove_old(self, *, keep: int | None) -> None:
        """Remove all checkpoints except the newest ones and the one of step `keep`."""
        for old in self._complete()[: -self._newest]:
            if old.name != f"step-{keep}":
                self._remove(old)

    @staticmethod
    def _remove(folder: Path) -> None:
        incomplete = folder.rename(folder.with_name(f"{folder.name}.tmp"))  # atomic: a kill leaves no incomplete step-N
        shutil.rmtree(incomplete, ignore_errors=True)


@dataclass(frozen=True)
class MemoryLimits:
    """The limits of a stage's micro-batches.

    micro_batch_tokens: the largest size; None without a limit. shared_forward: whether PPO may hold the graphs of all
    micro-batches of a step. restarts: how often the stage ran out of memory and restarted.
    """

    __pydantic_config__ = STRICT

    micro_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    shared_forward: bool = True
    restarts: int = 0


def read_limits(folder: Path) -> MemoryLimits:
    """Return the limits in a stage's folder, or no limits if it has no file. Raises UserError for a damaged file."""
    return read_record(folder / LIMITS_FILE, MemoryLimits, remedy="delete it") or MemoryLimits()


def write_limits(folder: Path, limits: MemoryLimits) -> None:
    """Write the limits for the next start. Several ranks may write the same limits at the same time."""
    write_json(folder / LIMITS_FILE, asdict(limits))


@dataclass(frozen=True)
class Rollback:
    """One return from step `step` to the checkpoint of step `to`, with the reason as a sentence."""

    __pydantic_config__ = STRICT

    step: int
    to: int
    reason: str


def read_rollbacks(folder: Path) -> list[Rollback]:
    """Return the rollbacks of a stage, oldest first. Raises UserError for a damaged file."""
    return read_record(folder / ROLLBACKS_FILE, list[Rollback], remedy="delete the stage's folder") or []


def roll_back(folder: Path, checkpoints: Checkpoints, rollback: Rollback) -> RestartStage:
    """Remove the checkpoints after a step, record the rollback, and return the exception for the launcher.

    Every rank calls. A stage that is killed before the record is written resumes with the learning rates before, comes
    to the same step, and rolls back again.
    """
    checkpoints.wait()
    if distributed.is_rank_zero():
        checkpoints.remove_after(rollback.to)
        with explained_disk(folder):
            write_json(folder / ROLLBACKS_FILE, [asdict(each) for each in [*read_rollbacks(folder), rollback]])
    distributed.barrier()
    return RestartStage(
        f"rolls back from step {rollback.step} to step {rollback.to} with {ROLLBACK_LR:g} times the learning rates"
    )


def within_limits(config: RunConfig, stage: str, folder: Path) -> RunConfig:
    """Return the configuration with the limits and the learning rates of the stage's folder. Every rank calls."""
    limits: MemoryLimits = distributed.broadcast_object(read_limits(folder))
    changes: dict[str, Any] = {}
    if limits.micro_batch_tokens is not None:
        configured = getattr(config, stage).micro_batch_tokens
        changes["micro_batch_tokens"] = min(configured, limits.micro_batch_tokens)
    if stage == "ppo" and not limits.shared_forward:
        changes["shared_forward"] = False
    rollbacks = distributed.broadcast_object(len(read_rollbacks(folder)))
    for rate in ("lr", "critic_lr") if rollbacks else ():
        if hasattr(getattr(config, stage), rate):
            changes[rate] = getattr(getattr(config, stage), rate) * ROLLBACK_LR**rollbacks
    return config.model_copy(update={stage: getattr(config, stage).model_copy(update=changes)})


def restart(folder: Path, problem: oom.PassOutOfMemory, *, tokens: int, longest: int) -> RestartStage:
    """Write smaller limits after a pass ran out of memory; return the exception that makes the launcher restart.

    tokens: the size of the micro-batches. longest: tokens of the longest sequence, the smallest possible size.
    Raises UserError if the micro-batches cannot be smaller.
    """
    stage, limits = folder.name, read_limits(folder)
    if problem.holds_graphs:
        limits, change = replace(limits, shared_forward=False), "ppo.shared_forward=false"
    elif tokens <= longest:
        raise UserError(
            f"{stage}.micro_batch_tokens={tokens} is a micro-batch of one sequence, and its pass runs out of memory "
            f"({problem}). Use shorter sequences ({_lengths(stage)}), engine.activation_checkpointing=true, a higher "
            "engine.zero_stage, an offload tier (engine=zero3-offload), more ranks that share a row "
            f"(engine.sequence_parallel) or adapters ({stage}.lora.rank=16)"
        ) from problem
    else:
        limits = replace(limits, micro_batch_tokens=max(longest, tokens // 2))
        change = f"{stage}.micro_batch_tokens={limits.micro_batch_tokens} instead of {tokens}"
    write_limits(folder, replace(limits, restarts=limits.restarts + 1))
    return RestartStage(
        f"out of memory ({problem}); the stage restarts from its newest checkpoint with {change}, which does not "
        "change the result"
    )


def _lengths(stage: str) -> str:
    return "rollout.max_prompt_tokens, rollout.max_new_tokens" if stage == "ppo" else f"{stage}.max_length"
