"""A stage's checkpoints, STAGE/checkpoints/step-N. They are written in the background. A restart loads the newest."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from engine import Checkpointer, Engine, checkpoint
from pipeline.distributed import broadcast_from_rank_zero, is_rank_zero
from pipeline.errors import UserError
from pipeline.files import explained_disk


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
        paths = [Path(path) for path in broadcast_from_rank_zero([str(p) for p in self._complete()])]
        damaged: dict[Path, str] = {}
        for path in reversed(paths):
            try:
                loaded = self.load(path)
            except checkpoint.Damaged as problem:
                damaged[path] = problem.reason
                continue
            if is_rank_zero():
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
        with self._explained():
            self._checkpointer.wait()

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
            if is_rank_zero():
                self.remove_incomplete()
            raise

    def _remove_old(self, *, keep: int | None) -> None:
        """Remove all checkpoints except the newest ones and the one of step `keep`."""
        for old in self._complete()[: -self._newest]:
            if old.name == f"step-{keep}":
                continue
            incomplete = old.rename(old.with_name(f"{old.name}.tmp"))  # atomic: a kill leaves no incomplete step-N
            shutil.rmtree(incomplete, ignore_errors=True)
