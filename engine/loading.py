"""Parameters of a sharded module: each rank reads its own slices of a safetensors folder, or computes them from a seed.

A rank holds its shard only, and one full parameter at most while random values are initialized.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.parallel import dist, dtensors
from engine.parallel.dtensors import Region, local_region
from engine.parallel.zero import persistent_buffers

__all__ = [
    "Region",
    "SafetensorsFolder",
    "initialize_parameters",
    "persistent_buffers",
    "read_parameters",
    "read_region",
]


class SafetensorsFolder:
    """The tensors of a folder of safetensors files, read slice by slice. A subclass may make other tensors of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists() and not single.exists():  # transformers leaves the index of an earlier save in the folder
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(single, framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each tensor. Opens each file once."""
        found: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self.files.values())):
            with safe_open(self.folder / file, framework="pt") as tensors:
                names = tensors.keys()
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        return {name: found[name] for name in self.files}

    def read(self, name: str, region: Region) -> Tensor:
        """Return a region of a tensor, or the full tensor if it is a scalar."""
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            view = file.get_slice(name)
            return read_region(view, region) if view.get_shape() else file.get_tensor(name)

    def copy(self, name: str, region: Region, target: Tensor) -> None:
        """Copy a region of a tensor into `target`. Raises ValueError for integers where numbers are needed."""
        values = self.read(name, region)
        if target.is_floating_point() and not values.is_floating_point():
            raise ValueError(
                f"{self.folder}: {name} has values of {values.dtype}, as quantized weights have, which cannot be "
                "trained: use the original model in 16 or 32 bits"
            )
        target.copy_(values.to(target.device))  # a copy to a GPU would convert the values on the host first


def read_region(tensor: Any, region: Region) -> Tensor:
    """Return a region of a tensor, or of an object with a tensor's indexing."""
    if max(map(len, region)) == 1:
        return tensor[tuple(rows for (rows,) in region)]  # type: ignore[no-any-return]
    (dim,) = (dim for dim, ranges in enumerate(region) if len(ranges) > 1)
    first = [ranges[0] for ranges in region]
    return torch.cat([tensor[(*first[:dim], rows, *first[dim + 1 :])] for rows in region[dim]], dim)


def _write(parameter: Tensor, values: Tensor) -> None:
    """Write this rank's region of a parameter, and of its fp32 master weight in an offloaded optimizer."""
    dtensors.local(parameter).copy_(values)
    if "write_master" in vars(parameter):
        vars(parameter)["write_master"](values)


@torch.no_grad()
def copy_local(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's region of a full tensor into a parameter."""
    if dtensors.local(parameter).numel():
        _write(parameter, read_region(full, local_region(parameter)) if full.ndim else full)


@torch.no_grad()
def read_parameters(
    parameters: Mapping[str, Tensor], folder: SafetensorsFolder, source_name: Mapping[str, str]
) -> None:
    """Fill parameters from a folder; `source_name` maps a parameter's name to the file's.

    Raises ValueError if a shape differs, or if a parameter has a value that is not finite.
    """
    damaged = []
    for name, parameter in parameters.items():
        stored = source_name[name]
        if folder.shapes[stored] != tuple(parameter.shape):
            raise ValueError(
                f"{folder.folder}: {stored} has shape {folder.shapes[stored]}, the model wants "
                f"{tuple(parameter.shape)}; its config.json does not belong to these weights"
            )
        local, region = dtensors.local(parameter), local_region(parameter)
        if not local.numel():
            continue
        if "write_master" in vars(parameter):
            values = torch.empty(local.shape)
            folder.copy(stored, region, values)
            _write(parameter, values)
        else:
            folder.copy(stored, region, local)
        if isinstance(parameter, nn.Parameter) and not _is_finite(local):
            damaged.append(stored)
        dist.note_work()
    if damaged:
        names = ", ".join(damaged[:3]) + (", ..." if len(damaged) > 3 else "")
        raise ValueError(
            f"{folder.folder}: the weights have NaN or infinite values in {len(damaged)} of {len(parameters)} tensors "
            f"({names}), so the training that wrote them failed or the files are damaged: use an earlier checkpoint, "
            "or download the model again"
        )


def _is_finite(values: Tensor) -> bool:
    """Return whether all values are finite. The extrema are NaN if any value is; they need no memory for a mask."""
    return not values.is_floating_point() or all(math.isfinite(bound.item()) for bound in torch.aminmax(values))


@torch.no_grad()
def initialize_parameters(
    root: nn.Module, names: Iterable[str], seed: int, initialize: Callable[[nn.Module, str], None]
) -> None:
    """Fill parameters with random values that do not depend on how they are sharded.

    Each module that owns some of `names` is copied with full parameters on the host. `initialize(copy, name)` writes
    them as for a plain model, and each rank copies its region. The seed is a hash of (seed, name of the plain module).
    """
    by_owner: dict[str, list[str]] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        by_owner.setdefault(owner, []).append(leaf)
    for owner, leaves in by_owner.items():
        live = root.get_submodule(owner)
        full = object.__new__(type(live))  # `copy` would call the constructor of an FSDP unit
        vars(full).update(vars(live))
        full._parameters = {
            key: None if p is None else nn.Parameter(torch.zeros(p.shape)) for key, p in live._parameters.items()
        }
        digest = hashlib.sha256(f"{seed}:{owner.removesuffix('.base_layer')}".encode()).digest()
        with torch.random.fork_rng(devices=[]):  # not `torch.manual_seed`, which would also seed the GPU
            torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
            initialize(full, owner)
        for leaf in leaves:
            values, parameter = full._parameters[leaf], live._parameters[leaf]
            assert values is not None and parameter is not None
            copy_local(parameter, values)
