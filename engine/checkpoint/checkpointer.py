"""Writing and reading checkpoints: into `NAME.tmp`, which is renamed when every rank is done.

A folder without `.tmp` was whole; what became of it since is seen before anything is read (sums.py). Writing goes on
behind training, which copies what is not yet written before it changes it (snapshot.py); where the host has no room for
that, or states are in files, training waits for the writing.
"""

import errno
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch.distributed.checkpoint as dcp
from torch import Tensor

from engine.checkpoint import contents, offloaded
from engine.checkpoint.background import behind, now, uncollected
from engine.checkpoint.chunks import in_chunks
from engine.checkpoint.device_copies import room_for
from engine.checkpoint.snapshot import Snapshot
from engine.checkpoint.storage import Reader, Writer
from engine.checkpoint.sums import require_undamaged
from engine.offload.together import together
from engine.parallel import dist, dtensors

COPIES_OF_FREE_MEMORY = 0.5  # share of the host's free memory that copies may take
Tensors = dict[str, dict[str, Tensor]]  # by engine, by name
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # no_dist is our wish


class Checkpointer:
    """Saves and loads several engines as one checkpoint, with plain values of each rank beside them (JSON)."""

    def __init__(self, engines: Mapping[str, contents.Trained]) -> None:
        self.engines = engines
        self._pending: Future[None] | None = None
        self._snapshot: Snapshot | None = None

    def save(
        self,
        folder: Path,
        shared: Mapping[str, Any],
        mine: Mapping[str, Any] | None = None,
        *,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to write `folder`. `shared` is the same on all ranks, `mine` differs; both must be JSON.

        `then` is done beside training on the first rank, when the folder is whole and has its name.
        Raises OSError, on every rank, where the previous write failed (a full disk), before anything of this one is
        written, and where the folder can't be made.
        """
        self.wait()
        staging = folder.with_name(folder.name + ".tmp")
        self._write_values(staging, shared, mine)
        tensors = {name: contents.tensors(engine) for name, engine in self.engines.items()}
        filed = contents.filed(self.engines)
        whole = not any(in_chunks(tensor) for part in tensors.values() for tensor in part.values())
        on_device = room_for(_local(tensors))
        beside = whole and not filed and _copies_fit(tensors, on_device=on_device)
        snapshot = _snapshot(tensors, on_device=on_device) if beside else Snapshot({})
        if beside:
            self._watch(snapshot)
        begun = threading.Event()
        work = partial(
            dcp.save,
            tensors,
            storage_writer=Writer(staging, snapshot, begun),
            planner=offloaded.SavePlanner(filed),
            process_group=dist.background_group(),
            no_dist=dist.world().size == 1,
        )
        named = partial(_name, staging, folder, then) if dist.world().leads else lambda: None
        self._pending = Future()
        with uncollected():
            try:
                saving = behind(work) if beside else now(work)
            except BaseException:  # Ctrl-C while the writing was waited for: nothing is left to wait for
                self._pending = None
                raise
            saving.add_done_callback(lambda _: begun.set())
            # The coordinator finishes after every rank has written: its index is the last file.
            saving.add_done_callback(partial(_settle, self._pending, snapshot, named))
            begun.wait()  # two threads that both want the interpreter take longer than one after the other

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self._pending is None or self._pending.done()

    def wait(self) -> None:
        """Until the last save is on disk. Raises OSError on every rank where it failed on any."""
        if self._pending is None:
            return
        error = self._pending.exception()
        self._pending = None
        self._watch(None)
        failures = [failure for failure in dist.gather_objects(_reason(error) if error else None) if failure]
        if failures:
            number, reason = failures[0]
            raise OSError(number, f"a checkpoint could not be written: {reason}") from error

    def wait_alone(self) -> None:
        """Until this rank has nothing left to write, whatever became of the writing: for a rank that ends."""
        if self._pending is not None:
            self._pending.exception()

    def load(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Fill the engines from a checkpoint. Returns (shared, mine); mine is None where the world size changed.

        Every rank calls. Before anything changes it raises Damaged where a file is not as it was written, and
        ValueError where it is a checkpoint of other engines.
        """
        require_undamaged(folder)
        state = json.loads((folder / "state.json").read_text())
        reader = Reader(folder)
        shapes = reader.shapes()
        for name, engine in self.engines.items():
            if name not in state["engines"]:
                raise ValueError(f"{folder} is a checkpoint of {', '.join(state['engines'])}, and has no {name}")
            own = {key.removeprefix(f"{name}."): shape for key, shape in shapes.items() if key.startswith(f"{name}.")}
            if (reason := contents.difference(engine, state["engines"][name], own)) is not None:
                raise ValueError(f"{folder} is a checkpoint of something else than {name}: {reason}")
        for name, engine in self.engines.items():
            engine.about_to_change()
            contents.make_room(engine, state["engines"][name])
        tensors = {
            name: contents.wanted(contents.tensors(engine), state["engines"][name])
            for name, engine in self.engines.items()
        }
        planner = offloaded.LoadPlanner(contents.filed(self.engines))
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=dist.host_group())
        for name, engine in self.engines.items():
            contents.restore_scalars(engine, state["engines"][name])
        same = state["ranks"] == dist.world().size
        mine = json.loads((folder / f"rank-{dist.world().rank}.json").read_text()) if same else None
        return state["shared"], mine

    def _write_values(self, staging: Path, shared: Mapping[str, Any], mine: Mapping[str, Any] | None) -> None:
        """A new folder, with all that is not tensors."""
        rank, leads = dist.world().rank, dist.world().leads
        scalars = {name: contents.all_scalars(engine) for name, engine in self.engines.items()}
        values = {"shared": shared, "engines": scalars, "ranks": dist.world().size}
        together(lambda: _new_folder(staging, values) if leads else None)
        together(lambda: _write_json(staging / f"rank-{rank}.json", mine or {}))

    def _watch(self, snapshot: Snapshot | None) -> None:
        """Have the engines complete this snapshot before they change what is in it, and no other."""
        for engine in self.engines.values():
            if self._snapshot is not None:
                engine.before_change.remove(self._snapshot.complete)
            if snapshot is not None:
                engine.before_change.append(snapshot.complete)
        self._snapshot = snapshot


def complete(parent: Path) -> list[Path]:
    """The checkpoints `step-N` of a folder that were written to their end, oldest first."""
    numbers = {p: p.name.removeprefix("step-") for p in parent.glob("step-*")}
    return sorted((p for p, number in numbers.items() if number.isdecimal()), key=lambda p: int(numbers[p]))


def _snapshot(tensors: Tensors, *, on_device: bool) -> Snapshot:
    """Of all local parts, by their names in the checkpoint. Buffers change in a forward."""
    local = {f"{engine}.{name}": dtensors.local(t) for engine, part in tensors.items() for name, t in part.items()}
    buffers = {f"{engine}.{name}" for engine, part in tensors.items() for name in part if contents.is_buffer(name)}
    return Snapshot(local, at_once=buffers, on_device=on_device)


def _local(tensors: Tensors) -> list[Tensor]:
    return [dtensors.local(tensor) for part in tensors.values() for tensor in part.values()]


def _copies_fit(tensors: Tensors, *, on_device: bool) -> bool:
    """Whether every rank's host has room for the copies that writing in the background may need."""
    copied = [tensor for tensor in _local(tensors) if tensor.device.type == "cpu" or not on_device]
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.world().size))
    needed = sum(tensor.nbytes for tensor in copied) * ranks_here
    return dist.max_over_ranks(needed / psutil.virtual_memory().available) < COPIES_OF_FREE_MEMORY


def _name(staging: Path, folder: Path, then: Callable[[], None]) -> None:
    """Give a written checkpoint its name, and what had it before up."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    staging.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    then()


def _settle(settled: "Future[None]", snapshot: Snapshot, named: Callable[[], None], done: "Future[Any]") -> None:
    """Finish a written checkpoint by `named`; what went wrong in writing or there is for whoever waits."""
    snapshot.end()
    try:
        done.result()
        named()
    except BaseException as error:
        settled.set_exception(error)
    else:
        settled.set_result(None)


def _reason(error: BaseException) -> tuple[int, str]:
    """The error number and what went wrong on the first rank where something did, without the stack that torch adds."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return getattr(first, "errno", None) or errno.EIO, getattr(first, "strerror", None) or str(first)


def _new_folder(staging: Path, values: Mapping[str, Any]) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    _write_json(staging / "state.json", values)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
