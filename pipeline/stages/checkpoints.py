"""A stage's checkpoints, STAGE/checkpoints/step-N: written while training goes on, the newest sound one found again."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from engine import Checkpointer, Engine
from engine.checkpoint import Damaged, complete
from pipeline.distributed import broadcast_from_rank_zero, is_rank_zero
from pipeline.errors import UserError
from pipeline.files import explained_disk


class Checkpoints:
    """Every rank makes one and calls alike. `newest` of them are kept, and one more that `save` may name."""

    def __init__(self, stage: Path, engines: Mapping[str, Engine], *, newest: int) -> None:
        self._stage, self._newest = stage, newest
        self._checkpointer = Checkpointer(engines)

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step is, if there is one."""
        return self._stage / "checkpoints" / f"step-{step}"

    def load(self, place: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Put a checkpoint's tensors back: what all ranks and what this one kept beside them. Raises Damaged."""
        return self._checkpointer.load(place)

    def load_newest(self) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
        """The newest that is undamaged, as `load` gives it; None where there is none at all.

        Raises UserError where there are checkpoints and all of them are damaged.
        """
        found = [Path(place) for place in broadcast_from_rank_zero([str(p) for p in self._complete()])]
        damaged: dict[Path, str] = {}
        for place in reversed(found):
            try:
                loaded = self.load(place)
            except Damaged as problem:
                damaged[place] = problem.reason
                continue
            if is_rank_zero():
                for folder, reason in damaged.items():
                    self._set_aside(folder, reason)
            return loaded
        if damaged:
            told = "; ".join(f"{place.name}: {reason}" for place, reason in damaged.items())
            raise UserError(
                f"no checkpoint in {self._stage / 'checkpoints'} is as it was written ({told}). Put a sound copy back; "
                "or delete that folder, and the same command begins the stage anew"
            )
        return None

    def save(self, step: int, shared: dict[str, Any], mine: dict[str, Any], *, keep: int | None) -> None:
        """Begin to write one, with what all ranks and what this one keep beside the tensors. Once it is whole, older
        ones are dropped, but not that of step `keep`.
        """
        with self._writing():
            self._checkpointer.save(self.place(step), shared, mine, then=partial(self._drop_old, keep=keep))

    def settle(self) -> None:
        """Wait until the last one is on disk."""
        with self._writing():
            self._checkpointer.wait()

    def settle_alone(self) -> None:
        """Wait until the last one is on disk as far as this rank writes it: others may be gone by now."""
        self._checkpointer.wait_alone()

    def drop_halves(self) -> None:
        """Remove those that were not written to their end."""
        for half in (self._stage / "checkpoints").glob("step-*.tmp"):
            shutil.rmtree(half, ignore_errors=True)

    def _complete(self) -> list[Path]:
        return complete(self._stage / "checkpoints")

    def _set_aside(self, damaged: Path, reason: str) -> None:
        """Out of the way of those to come, where it can be looked at."""
        aside = damaged.with_name(f"{damaged.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        damaged.rename(aside)
        told = f"{damaged} is damaged ({reason}), it is {aside.name} now; an older one serves"
        print(f"{self._stage.name}: {told}", flush=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One that failed leaves the disk as it found it."""
        try:
            with explained_disk(self._stage):
                yield
        except UserError:
            if is_rank_zero():
                self.drop_halves()
            raise

    def _drop_old(self, *, keep: int | None) -> None:
        """Keep the newest and that of step `keep`; removing gigabytes takes a file system tenths of a second."""
        for old in self._complete()[: -self._newest]:
            if old.name == f"step-{keep}":
                continue
            half = old.rename(old.with_name(f"{old.name}.tmp"))  # at once, whatever a kill leaves of it
            shutil.rmtree(half, ignore_errors=True)
