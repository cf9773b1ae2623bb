"""Fill a sharded module: each rank reads its own slices of a safetensors folder, or makes them from a seed.

No rank holds more of a file than its shard, and one whole parameter at most where values are drawn at random.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.parallel import dtensors

__all__ = [
    "Region",
    "SafetensorsFolder",
    "TensorFolder",
    "cut",
    "draw_parameters",
    "persistent_buffers",
    "read_parameters",
]

Region = tuple[tuple[slice, ...], ...]
"""Part of a tensor: for each dimension one slice, or several that stand side by side (in one dimension at most)."""


class TensorFolder(Protocol):
    """Tensors by name, of which parts can be read."""

    @property
    def folder(self) -> Path:
        """Where the files are."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is."""

    def read(self, name: str, region: Region) -> Tensor:
        """Part of one tensor (all of a scalar)."""

    def copy(self, name: str, region: Region, target: Tensor) -> None:
        """The same into a tensor of that shape."""


class SafetensorsFolder:
    """The tensors of a folder of safetensors files, read slice by slice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What there is. Opens each file once."""
        found: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self.files.values())):
            with safe_open(self.folder / file, framework="pt") as tensors:
                names = tensors.keys()
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        return {name: found[name] for name in self.files}

    def read(self, name: str, region: Region) -> Tensor:
        """Part of one tensor (all of a scalar)."""
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            view = file.get_slice(name)
            return cut(view, region) if view.get_shape() else file.get_tensor(name)

    def copy(self, name: str, region: Region, target: Tensor) -> None:
        """The same into a tensor of that shape."""
        target.copy_(self.read(name, region))


def local_region(parameter: Tensor) -> Region:
    """Which part of the whole parameter this rank holds.

    A tensor group splits first (engine/parallel/tensor.py), then FSDP2 cuts the rows of what is left into chunks.
    """
    region = [[range(length)] for length in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for at, name in reversed(list(enumerate(mesh.mesh_dim_names or ()))):
            placement: Any = parameter.placements[at]
            if not placement.is_replicate():
                # FSDP2 calls its chunks strided where a tensor group split the same dimension; plain chunks they are.
                pieces = getattr(placement, "split_factor", 1) if name == "tensor" else 1
                rank, size = mesh.get_local_rank(at), mesh.size(at)
                region[placement.dim] = [_chunk(part, rank, size) for part in _pieces(region[placement.dim], pieces)]
    return tuple(tuple(slice(part.start, part.stop) for part in parts) for parts in region)


def local_rows(parameter: Tensor) -> slice:
    """The rows this rank holds of a parameter that is cut by rows only."""
    return local_region(parameter)[0][0] if parameter.shape else slice(None)


def _pieces(parts: list[range], count: int) -> list[range]:
    assert len(parts) == 1, "a dimension in several pieces is not cut again"
    length = len(parts[0]) // count
    return [parts[0][i * length : (i + 1) * length] for i in range(count)]


def _chunk(part: range, rank: int, ranks: int) -> range:
    length = -(-len(part) // ranks)
    return part[rank * length : (rank + 1) * length]


def cut(whole: Any, region: Region) -> Tensor:
    """The region of a tensor, or of anything that is sliced like one."""
    if max(map(len, region)) == 1:
        return whole[tuple(part for (part,) in region)]  # type: ignore[no-any-return]
    (dim,) = (at for at, parts in enumerate(region) if len(parts) > 1)
    rest = [parts[0] for parts in region]
    return torch.cat([whole[(*rest[:dim], part, *rest[dim + 1 :])] for part in region[dim]], dim)


_also: dict[int, Callable[[Tensor], None]] = {}


@contextmanager
def also_into(keepers: Mapping[int, Callable[[Tensor], None]]) -> Iterator[None]:
    """Within the block `keepers[id(parameter)]` sees what is written into a parameter, before it is rounded to it."""
    _also.update(keepers)
    try:
        yield
    finally:
        _also.clear()


def _write(parameter: Tensor, values: Tensor) -> None:
    """This rank's part of it."""
    dtensors.local(parameter).copy_(values)
    keep = _also.get(id(parameter))
    if keep is not None:
        keep(values)


@torch.no_grad()
def copy_local(parameter: Tensor, whole: Tensor) -> None:
    """Take this rank's part of a whole tensor."""
    if dtensors.local(parameter).numel():
        _write(parameter, cut(whole, local_region(parameter)) if whole.ndim else whole)


@torch.no_grad()
def read_parameters(parameters: Mapping[str, Tensor], folder: TensorFolder, source_name: Mapping[str, str]) -> None:
    """Fill parameters from a folder; `source_name` maps a parameter's name to the file's. Shapes must agree."""
    for name, parameter in parameters.items():
        there = source_name[name]
        if folder.shapes[there] != tuple(parameter.shape):
            raise ValueError(
                f"{folder.folder}: {there} has shape {folder.shapes[there]}, the model wants {tuple(parameter.shape)}; "
                "its config.json does not belong to these weights"
            )
        local, region = dtensors.local(parameter), local_region(parameter)
        if not local.numel():
            continue
        if id(parameter) in _also:
            _write(parameter, folder.read(there, region))
        else:
            folder.copy(there, region, local)


@torch.no_grad()
def draw_parameters(
    root: nn.Module, names: Iterable[str], seed: int, initialize: Callable[[nn.Module, str], None]
) -> None:
    """Fill parameters with random values that do not depend on how they are sharded.

    Each module that owns some of `names` is copied with whole parameters on the host, `initialize(copy, name)` writes
    them as it does for a plain model, and each rank takes its part. The seed is that of (seed, module name).
    """
    wanted: dict[str, list[str]] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        wanted.setdefault(owner, []).append(leaf)
    for owner, leaves in wanted.items():
        live = root.get_submodule(owner)
        whole = _twin(live)
        whole._parameters = {
            key: None if p is None else nn.Parameter(torch.zeros(p.shape)) for key, p in live._parameters.items()
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{owner}".encode()).digest()[:7], "big"))
            initialize(whole, owner)
        for leaf in leaves:
            drawn, parameter = whole._parameters[leaf], live._parameters[leaf]
            assert drawn is not None and parameter is not None
            copy_local(parameter, drawn)


def _twin(module: nn.Module) -> nn.Module:
    """A copy that shares what it holds, of its very type: `copy` would construct the class of an FSDP unit anew."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    return twin


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict contains, by name: running statistics, a router's correction, scales.

    Buffers that the module computes at construction (rotary frequencies) are not persistent.
    """
    return {
        f"{path}.{leaf}" if path else leaf: buffer
        for path, owner in module.named_modules()
        for leaf, buffer in owner._buffers.items()
        if buffer is not None and leaf not in owner._non_persistent_buffers_set
    }
