"""Fill a sharded module: each rank reads its own slices of a safetensors folder, or makes them from a seed.

No rank holds more of a file than its shard, and one whole parameter at most where values are drawn at random.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from engine.parallel import dist


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

    def names(self) -> list[str]:
        return list(self.files)

    def read(self, name: str, rows: slice) -> Tensor:
        """Rows of one tensor's first dimension (all of a scalar)."""
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            view = file.get_slice(name)
            return view[rows] if view.get_shape() else file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())


def local_rows(parameter: Tensor) -> slice:
    """Which rows of the whole parameter this rank holds. FSDP2 shards the first dimension."""
    if not isinstance(parameter, DTensor) or not parameter.shape:
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return slice(offset[0], offset[0] + shape[0])


@torch.no_grad()
def copy_rows(parameter: Tensor, whole: Tensor) -> None:
    """Take this rank's rows of a whole tensor."""
    target = dist.local(parameter)
    if target.numel():
        target.copy_(whole[local_rows(parameter)] if whole.ndim else whole)


@torch.no_grad()
def read_parameters(
    parameters: Mapping[str, Tensor], folder: SafetensorsFolder, source_name: Mapping[str, str]
) -> None:
    """Fill parameters from a folder; `source_name` maps a parameter's name to the file's. Shapes must agree."""
    for name, parameter in parameters.items():
        there = source_name[name]
        if folder.shape(there) != tuple(parameter.shape):
            raise ValueError(
                f"{folder.folder}: {there} has shape {folder.shape(there)}, the model wants {tuple(parameter.shape)}; "
                "its config.json does not belong to these weights"
            )
        target = dist.local(parameter)
        if target.numel():
            target.copy_(folder.read(there, local_rows(parameter)))


@torch.no_grad()
def draw_parameters(
    root: nn.Module, names: Iterable[str], seed: int, initialize: Callable[[nn.Module, str], None]
) -> None:
    """Fill parameters with random values that do not depend on how they are sharded.

    Each module that owns some of `names` is copied with whole parameters on the host, `initialize(copy, name)` writes
    them as it does for a plain model, and each rank takes its rows. The seed is that of (seed, module name).
    """
    wanted: dict[str, list[str]] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        wanted.setdefault(owner, []).append(leaf)
    for owner, leaves in wanted.items():
        live = root.get_submodule(owner)
        whole = copy.copy(live)
        whole._parameters = {
            key: None if p is None else nn.Parameter(torch.zeros(p.shape)) for key, p in live._parameters.items()
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{owner}".encode()).digest()[:7], "big"))
            initialize(whole, owner)
        for leaf in leaves:
            drawn, parameter = whole._parameters[leaf], live._parameters[leaf]
            assert drawn is not None and parameter is not None
            copy_rows(parameter, drawn)
