"""Sharded training state on disk, through `torch.distributed.checkpoint`: whole or absent, loadable at any world size.

A checkpoint is written into `NAME.tmp` and renamed when every rank is done, so a folder without `.tmp` is whole. The
tensors are copied before `save` returns, and the writing itself goes on in the background; where the host has no room
for the copies, training waits for the writing instead.
"""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from engine import optim
from engine.compression.onebit_adam import ERRORS
from engine.offload import OffloadedOptimizer, planners
from engine.parallel import dist, dtensors
from engine.pieces import in_pieces, told_in_pieces

if TYPE_CHECKING:
    from engine.engine import Engine

COPIES_OF_FREE_MEMORY = 0.5  # share of the host's free memory that copies may take


class Checkpointer:
    """Saves and loads several engines as one checkpoint, with plain values of each rank beside them (JSON)."""

    def __init__(self, engines: Mapping[str, "Engine"]) -> None:
        self.engines = engines
        self._pending: Future[None] | None = None

    def save(self, folder: Path, shared: Mapping[str, Any], mine: Mapping[str, Any] | None = None) -> None:
        """Begin to write `folder`. `shared` is the same on all ranks, `mine` differs; both must be JSON.

        Raises OSError where the previous write failed (a full disk), before anything of this one is written.
        """
        self.wait()
        rank, leads = dist.world().rank, dist.world().leads
        staging = folder.with_name(folder.name + ".tmp")
        if leads:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            scalars = {name: _scalars(engine) for name, engine in self.engines.items()}
            _write_json(staging / "state.json", {"shared": shared, "engines": scalars, "ranks": dist.world().size})
        dist.barrier()
        _write_json(staging / f"rank-{rank}.json", mine or {})
        dist.barrier()
        tensors = {name: _tensors(engine) for name, engine in self.engines.items()}
        writer = dcp.FileSystemWriter(staging, single_file_per_rank=True)
        settled: Future[None] = Future()
        group = dist.background_group()
        filed = _filed(self.engines)
        whole = not any(in_pieces(tensor) for part in tensors.values() for tensor in part.values())  # copies forget
        if not whole or filed or not _copies_fit(tensors):
            planner = planners.SavePlanner(filed)
            saving: Any = _done(lambda: dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group))
        elif any(isinstance(engine.optimizer, OffloadedOptimizer) for engine in self.engines.values()):
            # torch's own copies (2.13) fail for DTensors over parts of one memory.
            copies = {name: {key: t.detach().clone() for key, t in part.items()} for name, part in tensors.items()}
            saving = _behind(lambda: dcp.save(copies, storage_writer=writer, process_group=group))
        else:
            saving = dcp.async_save(tensors, storage_writer=writer, process_group=group)
        self._pending = settled
        # The coordinator finishes after every rank has written: its metadata file is the last one.
        cast(Future[Any], saving).add_done_callback(lambda done: _settle(settled, done, staging, folder, leads=leads))

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self._pending is None or self._pending.done()

    def wait(self) -> None:
        """Until the last save is on disk. Raises OSError on every rank where it failed on any."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.exception()
        failures = [failure for failure in dist.gather_objects(_reason(error) if error else None) if failure]
        if failures:
            number, reason = failures[0]
            raise OSError(number, f"a checkpoint could not be written: {reason}") from error

    def load(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Fill the engines from a checkpoint. Returns (shared, mine); mine is None where the world size changed."""
        state = json.loads((folder / "state.json").read_text())
        for name, engine in self.engines.items():
            _make_room(engine, state["engines"][name])
        tensors = {name: _wanted(_tensors(engine), state["engines"][name]) for name, engine in self.engines.items()}
        planner = planners.LoadPlanner(_filed(self.engines))
        reader = dcp.FileSystemReader(folder)
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=dist.host_group())
        for name, engine in self.engines.items():
            _restore_scalars(engine, state["engines"][name])
        same = state["ranks"] == dist.world().size
        mine = json.loads((folder / f"rank-{dist.world().rank}.json").read_text()) if same else None
        return state["shared"], mine


def _copies_fit(tensors: Mapping[str, Mapping[str, Tensor]]) -> bool:
    """Whether every rank's host has room for the copies that writing in the background needs; else training waits."""
    local = [dtensors.local(tensor) for part in tensors.values() for tensor in part.values()]
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.world().size))
    needed = sum(tensor.numel() * tensor.element_size() for tensor in local) * ranks_here
    return dist.max_over_ranks(needed / psutil.virtual_memory().available) < COPIES_OF_FREE_MEMORY


def _done(save: Callable[[], Any]) -> Future[Any]:
    """Do it now, and say how it went as a background save does."""
    future: Future[Any] = Future()
    try:
        future.set_result(save())
    except BaseException as problem:  # torch's CheckpointException is no Exception
        if isinstance(problem, KeyboardInterrupt | SystemExit):
            raise
        future.set_exception(problem)
    return future


def _behind(save: Callable[[], Any]) -> Future[Any]:
    """Do it in a thread of its own."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(save())
        except BaseException as problem:  # torch's CheckpointException is no Exception
            future.set_exception(problem)

    threading.Thread(target=work, name="checkpoint").start()
    return future


def complete(parent: Path) -> list[Path]:
    """The whole checkpoints `step-N` of a folder, oldest first."""
    found = [p for p in parent.glob("step-*") if p.suffix != ".tmp" and (p / ".metadata").exists()]
    return sorted(found, key=lambda p: int(p.name.split("-")[1]))


def _tensors(engine: "Engine") -> dict[str, Tensor]:
    """What is trained, its optimizer's tensors and the module's buffers, by name; loading writes into these tensors."""
    assert engine.optimizer is not None
    buffers = {f"buffer.{name}": buffer for name, buffer in _buffers(engine.module)}
    if isinstance(engine.optimizer, OffloadedOptimizer):
        return _told(planners.tensors(engine.optimizer)[0]) | buffers
    trained = {f"parameter.{n}": p.detach() for n, p in engine.module.named_parameters() if p.requires_grad}
    moments = {name: tensor for name, tensor in optim.states(engine.module, engine.optimizer) if tensor.ndim}
    averages = {f"average.{name}": mean for name, mean in engine.average.tensors.items()}
    return _told(trained | moments | averages) | buffers


def _wanted(tensors: dict[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """What to read. 1-bit Adam's errors belong to a number of ranks; at another one they begin at zero again."""
    anew = {name for name in tensors if name.startswith(ERRORS) and name not in saved["moments"]}
    for name in anew:
        tensors[name].zero_()
    return {name: tensor for name, tensor in tensors.items() if name not in anew}


def _told(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: told_in_pieces(tensor) if in_pieces(tensor) else tensor for name, tensor in tensors.items()}


def _filed(engines: Mapping[str, "Engine"]) -> dict[str, planners.Filed]:
    """The states of all engines that are in files, by their names in the checkpoint."""
    return {
        f"{name}.{state}": place
        for name, engine in engines.items()
        if isinstance(engine.optimizer, OffloadedOptimizer)
        for state, place in planners.tensors(engine.optimizer)[1].items()
    }


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a state dict has: running statistics, not what is computed at construction."""
    for path, owner in module.named_modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and leaf not in owner._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, buffer


def _scalars(engine: "Engine") -> dict[str, Any]:
    """What goes into JSON: counters, and numbers of the optimizer's state."""
    assert engine.optimizer is not None
    if isinstance(engine.optimizer, OffloadedOptimizer):
        moments = [name for name, tier, _, kind in engine.optimizer.states() if kind in tier.kinds]
        numbers = engine.optimizer.numbers()
    else:
        found = dict(optim.states(engine.module, engine.optimizer))
        moments = [name for name, tensor in found.items() if tensor.ndim]
        numbers = {name: tensor.item() for name, tensor in found.items() if not tensor.ndim}
    return {
        "step_count": engine.step_count, "scaler": engine.scaler.state(), "moments": moments, "numbers": numbers,
    }  # fmt: skip


def _make_room(engine: "Engine", saved: Mapping[str, Any]) -> None:
    """Give the optimizer exactly the states that the checkpoint has: a parameter without a gradient has none yet."""
    assert engine.optimizer is not None
    if isinstance(engine.optimizer, OffloadedOptimizer):
        engine.optimizer.make_room(saved["moments"], saved["numbers"])
        return
    if saved["moments"] or saved["numbers"]:
        optim.make_states(engine.optimizer)
    kept = {name.partition(".")[2] for name in [*saved["moments"], *saved["numbers"]]}
    for name, parameter in engine.module.named_parameters():
        if name not in kept:
            engine.optimizer.state.pop(parameter, None)


def _restore_scalars(engine: "Engine", saved: Mapping[str, Any]) -> None:
    assert engine.optimizer is not None
    engine.step_count = saved["step_count"]
    engine.scaler.restore(saved["scaler"])
    if isinstance(engine.optimizer, OffloadedOptimizer):
        engine.optimizer.show("parameter")
        return
    for name, tensor in optim.states(engine.module, engine.optimizer):
        if not tensor.ndim:
            tensor.fill_(saved["numbers"][name])


def _settle(settled: Future[None], done: Future[Any], staging: Path, folder: Path, *, leads: bool) -> None:
    """Give a written checkpoint its name; what went wrong in writing or here is for whoever waits."""
    try:
        done.result()
        if leads:
            shutil.rmtree(folder, ignore_errors=True)
            staging.rename(folder)
    except BaseException as error:
        settled.set_exception(error)
    else:
        settled.set_result(None)


def _reason(error: BaseException) -> tuple[int, str]:
    """The error number and what went wrong on the first rank where something did, without the stack that torch adds."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return getattr(first, "errno", None) or errno.EIO, getattr(first, "strerror", None) or str(first)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def random_state() -> dict[str, Any]:
    """This rank's random generators, as JSON."""
    state: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back where `random_state` found them."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))
