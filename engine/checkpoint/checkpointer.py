"""Saves and loads checkpoints: complete or absent, in the background, for any number of ranks.

`save` copies this rank's tensors into host memory, and a thread writes the copy (`torch.distributed.checkpoint.save`)
while training continues. If the host has no room for the copy, training waits until the checkpoint is written.

The state of an engine consists of tensors by name, and of counters in JSON.
"""

import errno
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from engine import optim
from engine.checkpoint.storage import LoadPlanner, LocalChunks, SavePlanner, Writer, chunks_of, verify
from engine.config import OptimizerConfig
from engine.host_memory import host_memory
from engine.optimizer_step import Average, LossScaler, Optimizer
from engine.optimizers import ERRORS
from engine.parallel import dist, zero

PARAMETER, AVERAGE, BUFFER = "parameter.", "average.", "buffer."  # prefixes of the names of tensors
COPY_SHARE = 0.5  # of the host's free memory that the copies of all its ranks may use

log = logging.getLogger(__name__)


class Trained(Protocol):
    """The state of a training engine (`engine.engine.Engine`)."""

    module: nn.Module
    step_count: int
    scaler: LossScaler
    average: Average
    optimizer: "Optimizer | None"
    optimizer_config: OptimizerConfig | None


class Checkpointer:
    """Saves and loads several engines as one checkpoint, with plain JSON values."""

    def __init__(self, engines: Mapping[str, Trained]) -> None:
        self.engines = engines
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Any] | None = None
        self._has_warned = False

    def save(
        self,
        folder: Path,
        shared: Mapping[str, Any],
        mine: Mapping[str, Any] | None = None,
        *,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to write the checkpoint `folder`. Every rank calls.

        `shared` is the same on all ranks, `mine` is this rank's; both must be JSON. `then` runs on rank 0, in the
        background, after the folder is complete and has its name.

        Raises OSError on every rank if the previous save failed (a full disk), before this one writes anything.
        """
        self.wait()
        for engine in self.engines.values():
            zero.release(engine.module)  # gathered parameters are not those of the optimizer
        counters = {
            name: {"step_count": engine.step_count, "scaler": engine.scaler.state()}
            for name, engine in self.engines.items()
        }
        values = {f"rank-{dist.world().rank}.json": json.dumps(mine or {})}
        state = {"shared": shared, "engines": counters, "ranks": dist.world().size, "tensor": dist.world().tensor}
        text = json.dumps(state)  # on every rank, so that all of them raise if `shared` is not JSON
        if dist.is_rank_zero():
            values["state.json"] = text
        tensors = {f"{n}.{key}": c for n, engine in self.engines.items() for key, c in _tensors(engine).items()}
        if dist.world().data_rank != 0:  # running statistics differ between ranks, and DCP would mix them
            tensors = {name: chunks for name, chunks in tensors.items() if not _is_buffer(name)}
        can_copy = self._can_copy(tensors)
        for name, chunks in tensors.items():
            # Buffers may share memory, which safetensors refuses to write.
            if can_copy or _is_buffer(name):
                tensors[name] = chunks.copy_to_host()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._pending = self._thread.submit(
            dcp.save,
            tensors,
            storage_writer=Writer(folder, values, then),
            planner=SavePlanner(),
            process_group=dist.checkpoint_group(),
        )
        if not can_copy:
            wait([self._pending])

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises OSError on every rank if it failed on any rank."""
        if self._pending is None:
            return
        error = self._pending.exception()
        self._pending = None
        if error is not None:
            number, reason = _reason(error)
            raise OSError(number, f"a checkpoint could not be written: {reason}") from error

    def load(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Load a checkpoint into the engines. Returns (shared, mine).

        mine is None at another number of ranks, or in tensor groups of another size.

        Every rank calls. Raises Damaged if a file differs from what was written, and ValueError if the checkpoint is
        of other engines. Both are raised before any engine is changed.
        """
        for engine in self.engines.values():
            zero.release(engine.module)
        verify(folder)
        state = json.loads((folder / "state.json").read_text())
        reader = dcp.HuggingFaceStorageReader(str(folder))
        metadata = reader.read_metadata().state_dict_metadata
        shapes: dict[str, dict[str, torch.Size]] = {name: {} for name in state["engines"]}
        for key, tensor in metadata.items():
            name, _, own_key = key.partition(".")
            if isinstance(tensor, TensorStorageMetadata):
                shapes[name][own_key] = tensor.size
        for name, engine in self.engines.items():
            if name not in shapes:
                raise ValueError(f"{folder} is a checkpoint of {', '.join(shapes)}, and has no {name}")
            if (reason := _difference(engine, shapes[name], state["engines"][name])) is not None:
                raise ValueError(f"{folder} is a checkpoint of something else than {name}: {reason}")
        tensors: dict[str, LocalChunks] = {}
        for name, engine in self.engines.items():
            _allocate_states(engine, shapes[name])
            tensors |= {f"{name}.{key}": chunks for key, chunks in _tensors_to_load(engine, shapes[name]).items()}
        dcp.load(tensors, storage_reader=reader, planner=LoadPlanner(), process_group=dist.checkpoint_group())
        for name, engine in self.engines.items():
            _restore_counters(engine, state["engines"][name])
        world = dist.world()
        # The ranks of a tensor group have equal random states. Earlier versions did not write "tensor".
        is_same_layout = (state["ranks"], state.get("tensor", 1)) == (world.size, world.tensor)
        mine = json.loads((folder / f"rank-{world.rank}.json").read_text()) if is_same_layout else None
        return state["shared"], mine

    def _can_copy(self, tensors: Mapping[str, LocalChunks]) -> bool:
        """Return whether the host has room for a copy of all ranks' tensors. Log the first refusal."""
        values = [chunks.values for chunks in tensors.values()]
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.world().size))
        # PyTorch rounds pinned memory up to powers of two, and keeps what earlier copies no longer use.
        needed = ranks * sum(1 << (v.nbytes - 1).bit_length() if v.is_cuda and v.nbytes else v.nbytes for v in values)
        free = host_memory().available
        if any(v.is_cuda for v in values):
            pinned = torch.cuda.host_memory_stats()
            allocated = pinned.get("allocated_bytes.current", 0)
            free += ranks * (allocated - pinned.get("active_bytes.current", allocated))  # older versions lack it
        if needed <= COPY_SHARE * free:
            return True
        if not self._has_warned:
            log.warning(
                "checkpoint: training waits while it is written, because a copy (%.1f GiB) needs more than %.0f %% of "
                "the host's free memory (%.1f GiB)", needed / 2**30, 100 * COPY_SHARE, free / 2**30,
            )  # fmt: skip
            self._has_warned = True
        return False


def _is_buffer(name: str) -> bool:
    """Return whether a tensor of a checkpoint, "engine.kind.name", is a buffer."""
    return name.partition(".")[2].startswith(BUFFER)


def complete(parent: Path) -> list[Path]:
    """Return the complete checkpoints `step-N` of a folder, oldest first."""
    numbers = {path: path.name.removeprefix("step-") for path in parent.glob("step-*")}
    return sorted((path for path, number in numbers.items() if number.isdecimal()), key=lambda p: int(numbers[p]))


def random_state() -> dict[str, Any]:
    """Return the states of this rank's random generators, as JSON."""
    state: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states of this rank's random generators from `random_state`."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))


def _reason(error: BaseException) -> tuple[int, str]:
    """Return the error number and the message of the first rank that failed, without the stack that torch adds."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return getattr(first, "errno", None) or errno.EIO, getattr(first, "strerror", None) or str(first)


def _tensors(engine: Trained) -> dict[str, LocalChunks]:
    """Return trained parameters, optimizer states, averages and buffers by name.

    The states of a parameter have the names "kind.parameter name". An offloaded optimizer also has the fp32 masters and
    the averages. A parameter with an fp32 master is represented by its master.
    """
    assert engine.optimizer is not None
    trained = {f"{PARAMETER}{n}": p for n, p in engine.module.named_parameters() if p.requires_grad}
    averages = {f"{AVERAGE}{name}": mean for name, mean in engine.average.tensors.items()}
    buffers = {f"{BUFFER}{name}": buffer for name, buffer in zero.persistent_buffers(engine.module).items()}
    found = {name: chunks_of(tensor) for name, tensor in (trained | averages | buffers).items()}
    states = engine.optimizer.state
    for name, parameter in engine.module.named_parameters():
        for kind, value in states.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{kind}.{name}"] = chunks_of(value, parameter) if value.ndim else chunks_of(value.view(1))
    return found


def _tensors_to_load(engine: Trained, shapes: Mapping[str, torch.Size]) -> dict[str, LocalChunks]:
    """Return the tensors to read from a checkpoint with these shapes.

    States that the checkpoint does not have are those of a new optimizer. The errors of 1-bit Adam belong to a number
    of ranks. At another number they start at zero again.
    """
    found = _tensors(engine)
    for name in _states(found):
        if name not in shapes:
            state = found.pop(name)
            if name.startswith(ERRORS):
                state.values.zero_()
    return found


def _difference(engine: Trained, shapes: Mapping[str, torch.Size], counters: Mapping[str, Any]) -> str | None:
    """Return why a checkpoint with tensors of these shapes does not fit this engine. None if it fits.

    Some optimizers have no states before the first step that is not skipped.
    """
    assert engine.optimizer_config is not None
    trained = {f"{PARAMETER}{n}": p.shape for n, p in engine.module.named_parameters() if p.requires_grad}
    buffers = {f"{BUFFER}{name}": b.shape for name, b in zero.persistent_buffers(engine.module).items()}
    here: dict[str, torch.Size] = {}
    for part in dist.gather_objects(trained | buffers):  # the stages of a pipeline have different parameters
        here |= part
    others = [name for name in shapes if name.startswith(PARAMETER) and name not in here]
    for name in [*here, *others]:
        found, own = (tuple(s[name]) if name in s else "absent" for s in (shapes, here))
        if found != own:
            return f"{name} is {found} there and {own} here"
    if engine.average.runs and not any(name.startswith(AVERAGE) for name in shapes):
        return "it has no average of the weights, but start_averaging was called here"
    there = {name.partition(".")[0] for name in _states(shapes) if not name.startswith(ERRORS)}
    states = {name for name in optim.example_states(engine.optimizer_config) if not name.startswith(ERRORS)}
    if there != states and (there or counters["step_count"] > counters["scaler"]["skipped"]):
        found, own = (", ".join(sorted(names)) or "none" for names in (there, states))
        return f"its optimizer has the states {found}; {engine.optimizer_config.name} has {own}"
    return None


def _states(names: Iterable[str]) -> list[str]:
    """Return the names of optimizer states among the names of an engine's tensors."""
    return [name for name in names if not name.startswith((PARAMETER, AVERAGE, BUFFER))]


def _allocate_states(engine: Trained, shapes: Mapping[str, torch.Size]) -> None:
    """Give the optimizer the states that the checkpoint has."""
    assert engine.optimizer is not None and engine.optimizer_config is not None
    names = {name.partition(".")[2] for name in _states(shapes)}
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        optim.allocate_states(engine.module, engine.optimizer, engine.optimizer_config, names)
    else:
        engine.optimizer.allocate_states(names)


def _restore_counters(engine: Trained, saved: Mapping[str, Any]) -> None:
    """Restore step count, loss scale and the module of an offloaded optimizer, after the tensors were loaded."""
    assert engine.optimizer is not None
    engine.step_count = saved["step_count"]
    engine.scaler.restore(saved["scaler"])
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        engine.optimizer.write_to_module("parameter")
