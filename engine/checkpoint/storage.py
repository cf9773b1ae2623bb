"""The files of a checkpoint, written and read by `torch.distributed.checkpoint` (DCP). None of them holds a pickle.

    tensors-R.safetensors     the chunks that rank R wrote
    tensors-R-1.safetensors   more chunks, after FILE_BYTES; also second chunks of the same tensors (experts whose gate
                              and up matrices share a tensor)
    rank-R.json               plain values of rank R (its random state)
    state.json                plain values that all ranks share, written by rank 0
    checksums.json            {file name: {"bytes": size, "xxh3_128": hexadecimal digest}}, written last

A load compares all checksums before it reads anything. XXH3 runs at the speed of memory. It detects disks, copies and
editors that change a file, not forgery.

The metadata of a safetensors file holds the offsets of each chunk in the form of torch's `HuggingFaceStorageReader`,
which reads them. Its `HuggingFaceStorageWriter` is not used: it builds each file in memory a second time, and writes
one chunk per tensor name and rank.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from engine.oom import is_out_of_memory
from engine.parallel import dist, dtensors

log = logging.getLogger(__name__)
CHECKSUMS = "checksums.json"
Checksum = dict[str, int | str]  # of a file: {"bytes": size, "xxh3_128": hexadecimal digest}
FILE_BYTES = 2**30  # of chunks in one file: tensors on a GPU are copied to the host file by file
OWN_FILES = re.compile(r"(tensors-\d+(-\d+)?\.safetensors|rank-\d+\.json|state\.json|checksums\.json)")


@dataclass(frozen=True)
class LocalChunks:
    """This rank's `values` of a tensor that is sharded like `layout`.

    DCP takes a DTensor as one chunk. Here a rank may hold several chunks of a tensor: experts whose gate and up
    matrices share one tensor (engine/parallel/tensor.py).
    """

    layout: Tensor
    values: Tensor

    @property
    def by_offset(self) -> dict[torch.Size, Tensor]:
        """Return the chunks by their offsets in the full tensor, without empty ones. They are views."""
        region = dtensors.local_region(self.layout)
        start = [slices[0].start for slices in region]
        chunks = {torch.Size(start): self.values}
        for dim, slices in enumerate(region):
            if len(slices) > 1:
                starts = (torch.Size([*start[:dim], rows.start, *start[dim + 1 :]]) for rows in slices)
                chunks = dict(zip(starts, self.values.chunk(len(slices), dim), strict=True))
        return {offsets: chunk for offsets, chunk in chunks.items() if chunk.numel() or not self.layout.numel()}

    def copy_to_host(self) -> "LocalChunks":
        """Return the same chunks with a copy of the values in host memory, pinned for a copy from a GPU if possible.

        On WSL 2, about 1 GiB can be pinned. A copy to other memory is complete when it returns.
        """
        try:
            copy = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=self.values.is_cuda)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.info("checkpoint: no more memory can be pinned, so copies from the GPU take longer (%s)", error)
            copy = torch.empty(self.values.shape, dtype=self.values.dtype)
        copy.copy_(self.values, non_blocking=True)
        return LocalChunks(self.layout, copy)

    # The protocol torch.distributed._checkpointable._Checkpointable, which DTensor implements too.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, chunk.size()) for offsets, chunk in self.by_offset.items()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties, size = TensorProperties(dtype=self.values.dtype), self.layout.size()
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.by_offset[index.offset]


def chunks_of(tensor: Tensor, parameter: Tensor | None = None) -> LocalChunks:
    """Return the chunks of a tensor or DTensor. A plain tensor may be the local shard of a state of a parameter."""
    layout = tensor if parameter is None or isinstance(tensor, DTensor) else parameter
    return LocalChunks(layout.detach(), dtensors.local(tensor.detach()))


class SavePlanner(DefaultSavePlanner):
    """Plans the writing of {name: LocalChunks}. DCP removes chunks that several ranks hold."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)  # type: ignore[no-any-return]


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reading of {name: LocalChunks} from a checkpoint with any other division into chunks."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Do what the method of the base class does for tensors only."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)  # type: ignore[no-any-return]


class Writer(FileSystemWriter):
    """Writes `FOLDER.tmp` and renames it to `folder` after every rank has finished.

    `values` are this rank's JSON files by name. `then` runs on rank 0 after the folder has its name.
    """

    def __init__(self, folder: Path, values: Mapping[str, str], then: Callable[[], None]) -> None:
        self._folder, self._staging = folder, Path(f"{folder.absolute()}.tmp")
        super().__init__(self._staging)
        self._values, self._then = values, then

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Do not make the folder: rank 0 removes an incomplete one first."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Replace an incomplete folder by an empty one. Only rank 0 calls, before any rank writes.

        Raises FileExistsError if the new folder would replace the current folder, or files that no checkpoint has.
        """
        others = [path.name for path in self._folder.glob("*") if not OWN_FILES.fullmatch(path.name)]
        reason = f"has other files ({min(others)})" if others else "is the current folder"
        if others or self._folder.absolute() == Path.cwd():
            problem = f"{self._folder} {reason}, which the checkpoint would replace"
            raise FileExistsError(errno.EEXIST, f"{problem}. Use a new folder, such as {self._folder}/checkpoint")
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(parents=True, exist_ok=True)
        return plans

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's files. Returns their checksums. Raises OSError."""
        self._staging.mkdir(parents=True, exist_ok=True)  # another host's file system may not see rank 0's folder yet
        checksums: dict[str, Checksum] = {}
        for number, items in enumerate(_items_by_file(plan.items)):
            name = f"tensors-{dist.world().rank}{f'-{number}' if number else ''}.safetensors"
            _save_tensors(self._staging / name, items, planner)
            checksums[name] = checksum_of(self._staging / name, sync=True)
        for name, text in self._values.items():
            checksums[name] = write_text(self._staging / name, text)
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(MetadataIndex(name), int(c["bytes"]), c) for name, c in checksums.items()])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the checksums of all ranks' files and rename the folder. Only rank 0 calls."""
        checksums = {result.index.fqn: result.storage_data for rank in results for result in rank}
        write_text(self._staging / CHECKSUMS, json.dumps(checksums))
        _sync_folder(self._staging)
        old = self._folder.with_name(self._folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(old)
        self._staging.rename(self._folder)
        _sync_folder(self._folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        self._then()


def _items_by_file(items: list[WriteItem]) -> list[dict[str, WriteItem]]:
    """Distribute chunks over files. A file holds one chunk of each tensor at most, and begins below FILE_BYTES."""
    files, sizes = list[dict[str, WriteItem]](), list[int]()
    for item in items:
        fitting = (n for n, file in enumerate(files) if item.index.fqn not in file and sizes[n] < FILE_BYTES)
        number = next(fitting, len(files))
        if number == len(files):
            files.append({})
            sizes.append(0)
        files[number][item.index.fqn] = item
        sizes[number] += item.tensor_storage_size() or 0
    return files


def _save_tensors(path: Path, items: Mapping[str, WriteItem], planner: AnySavePlanner) -> None:
    """Write a safetensors file. Raises OSError."""
    chunks: dict[str, Any] = {name: planner.resolve_data(item) for name, item in items.items()}
    tensors = {name: chunk.detach().cpu().contiguous() for name, chunk in chunks.items()}
    offsets = {name: {"saved_offsets": list(item.index.offset or ())} for name, item in items.items()}
    try:
        save_file(tensors, path, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)})
    except SafetensorError as error:  # it has the number of the system's error in its text only
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error)) from error


def _sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of a folder's files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Damaged(OSError):
    """A file of a checkpoint differs from what was written. `reason` names the file and the difference."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"the checkpoint {folder} is damaged: {reason}")
        self.reason = reason


def write_text(path: Path, text: str) -> Checksum:
    """Write a new file, wait until the disk has it, and return its checksum. Raises OSError."""
    path.write_text(text, encoding="utf-8")
    return checksum_of(path, sync=True)


def verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its checksum. Each rank reads its share of the files.

    Raises Damaged on every rank if a file differs, or if a file that a load reads has no checksum.
    """
    reasons = [reason for reason in dist.gather_objects(_damage(folder)) if reason is not None]
    if reasons:
        raise Damaged(folder, reasons[0])


def checksum_of(path: Path, *, sync: bool = False) -> Checksum:
    """Read a file and return its checksum. `sync` waits until the disk has the file. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, xxhash.xxh3_128)  # type: ignore[arg-type]
        if sync and hasattr(os, "posix_fadvise"):  # leaves the page cache to the training data; macOS has no such call
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return {"bytes": file.tell(), "xxh3_128": digest.hexdigest()}


def _damage(folder: Path) -> str | None:
    """Return how this rank's share of the files differs from what was written. None if it is the same."""
    try:
        content = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        checksums = {Path(name).name: {"bytes": c["bytes"], "xxh3_128": c["xxh3_128"]} for name, c in content.items()}
    except FileNotFoundError:
        missing = f"{CHECKSUMS} is missing (zerochat 0.1 wrote checkpoints of another format)"
        return missing if folder.is_dir() else "there is no such folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return f"{CHECKSUMS} cannot be read ({problem})"
    read = {path.name for suffix in ("json", "safetensors") for path in folder.glob(f"*.{suffix}")} - {CHECKSUMS}
    if unlisted := (read | {"state.json"}) - checksums.keys():
        return f"{CHECKSUMS} has no checksum of {min(unlisted)}"
    own = list(checksums)[dist.world().rank :: dist.world().size]
    return next((reason for name in own if (reason := _difference(folder / name, checksums[name]))), None)


def _difference(path: Path, expected: Checksum) -> str | None:
    """Return how a file differs from its checksum. None if it is the same."""
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{path.name} has {size} bytes, was written with {expected['bytes']}"
        return None if checksum_of(path) == expected else f"{path.name} has other bytes than were written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as problem:
        return f"{path.name} cannot be read ({problem.strerror or problem})"
