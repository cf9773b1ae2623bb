"""How tensors lie on disk: the numbers of each as they are, one after another, and an index of them in JSON.

    tensors-R.bin   what rank R wrote
    index.json      {"tensors": {name: {"dtype", "shape", "pieces": [{"offsets", "shape", "file", "at"}]}}}
    sums.json       what all files of the folder are, so that damage is found (sums.py)

For `torch.distributed.checkpoint`, whose own format goes through Python and a checksum byte by byte, and has its index
as a pickle. Large aligned requests past the page cache leave the processors to training. Nothing in a file can be
executed.
"""

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from engine.checkpoint.background import uncollected
from engine.checkpoint.device_copies import Landing
from engine.checkpoint.snapshot import Snapshot
from engine.checkpoint.stream import Stream
from engine.checkpoint.sums import Sum, write_sums
from engine.offload.blocks import BLOCK_BYTES, BlockFile, aligned, bytes_of, whole_bytes

INDEX = "index.json"
Plan = TypeVar("Plan")


@dataclass(frozen=True)
class _Place:
    """Where a piece of a tensor lies: a file, the byte it begins at."""

    file: str
    at: int


class Writer(StorageWriter):
    """Writes one file a rank into a folder that is there. `snapshot` says what to read in the place of live tensors."""

    def __init__(self, folder: Path, snapshot: Snapshot, begun: threading.Event) -> None:
        """`begun` is set when the planning is over, which is Python's work, and the disk's begins."""
        super().__init__()
        self._folder, self._snapshot, self._begun = folder, snapshot, begun
        self._landing: Landing | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"tensors-{rank}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """One item after another; where each is, and what the file is then. Raises OSError."""
        name: str = plan.storage_data
        self._snapshot.keep_only({item.index.fqn for item in plan.items})
        self._begun.set()
        file = BlockFile(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, what=name)
        stream, written = Stream(file), []
        try:
            for item in plan.items:
                start, size = self._write(stream, item, planner)
                written.append(WriteResult(item.index, size, _Place(name, start)))
            whole = stream.close()
            file.to_disk()
        finally:
            file.close()
        return _done([*written, WriteResult(MetadataIndex(name), whole.bytes, whole)])

    def _write(self, stream: Stream, item: WriteItem, planner: SavePlanner) -> tuple[int, int]:
        """One item: where it begins, and its bytes."""
        assert item.type is not WriteItemType.BYTE_IO, f"{item.index.fqn} is no tensor"
        name, data = item.index.fqn, planner.resolve_data(item)
        assert isinstance(data, Tensor)
        with self._snapshot.reading(name, data) as source:
            live = source.device.type == "cpu" and source.is_contiguous()
            address, parts = (source.data_ptr(), []) if live else self._landed(source)
            start = stream.begin(address, data.nbytes)
            for part in parts:
                rest = bytes_of(part)
                while rest:
                    rest = rest[stream.write(rest) :]
        done = 0 if live else data.nbytes
        while done < data.nbytes:
            with self._snapshot.reading(name, data) as source:
                done += stream.write(bytes_of(source)[done:])
        self._snapshot.read(name)
        return start, data.nbytes

    def _landed(self, source: Tensor) -> tuple[int, Iterable[Tensor]]:
        """A tensor on the host, in parts: where the first lies, and they."""
        if source.device.type == "cuda" and source.is_contiguous():
            self._landing = self._landing or Landing(source.device, self._snapshot.made)
            return self._landing.address, self._landing.parts(source)
        here = source.to("cpu").contiguous()
        return here.data_ptr(), [here]

    @uncollected()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The index and the sums, when all ranks have written."""
        found = [result for rank in results for result in rank]
        places = {result.index: result.storage_data for result in found if isinstance(result.storage_data, _Place)}
        known = {result.index.fqn: result.storage_data for result in found if isinstance(result.storage_data, Sum)}
        tensors = {}
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            pieces = [
                {"offsets": list(chunk.offsets), "shape": list(chunk.sizes), "file": place.file, "at": place.at}
                for chunk in about.chunks
                for place in [places[MetadataIndex(name, chunk.offsets)]]
            ]
            dtype = str(about.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(about.size), "pieces": pieces}
        # `dump` goes through Python, which training needs.
        (self._folder / INDEX).write_text(json.dumps({"tensors": tensors}), encoding="utf-8")
        write_sums(self._folder, known)


class Reader(StorageReader):
    """Reads what `Writer` wrote, on any number of ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._places: dict[MetadataIndex, tuple[_Place, torch.Size, torch.dtype]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def shapes(self) -> dict[str, torch.Size]:
        """Of all tensors, whole."""
        found = self.read_metadata().state_dict_metadata.items()
        return {name: about.size for name, about in found if isinstance(about, TensorStorageMetadata)}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        index = json.loads((self._folder / INDEX).read_text(encoding="utf-8"))
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _Place] = {}
        for name, about in index["tensors"].items():
            chunks = []
            for piece in about["pieces"]:
                chunk = ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["shape"]))
                chunks.append(chunk)
                places[MetadataIndex(name, chunk.offsets)] = _Place(piece["file"], piece["at"])
            properties = TensorProperties(dtype=getattr(torch, about["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(about["shape"]), chunks)
        return Metadata(tensors, planner_data={}, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            for chunk in about.chunks:
                index = MetadataIndex(name, chunk.offsets)
                self._places[index] = (metadata.storage_data[index], chunk.sizes, about.properties.dtype)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Raises OSError, also for a file that is too short."""
        files: dict[str, BlockFile] = {}
        try:
            for item in plan.items:
                place, shape, dtype = self._places[item.storage_index]
                if place.file not in files:
                    files[place.file] = BlockFile(self._folder / Path(place.file).name, what=place.file)
                values = _rows(files[place.file], item, place.at, shape, dtype)
                target = planner.resolve_tensor(item).detach()
                target.copy_(values)
                planner.commit_tensor(item, target)
        finally:
            for file in files.values():
                file.close()
        return _done(None)


def _rows(file: BlockFile, item: ReadItem, at: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The part of a piece (`shape`, from byte `at`) that an item asks for; only its rows are read."""
    first, wanted = (item.storage_offsets[0], item.lengths[0]) if shape else (0, 1)
    row = shape[1:].numel() * dtype.itemsize
    start = at + first * row
    before = start % BLOCK_BYTES  # whole blocks, so that they need not go through the page cache
    room = aligned(whole_bytes(before + wanted * row), torch.uint8)
    file.transfer(os.preadv, bytes_of(room), start - before)
    values = room[before : before + wanted * row].view(dtype)
    values = values.view(wanted, *shape[1:]) if shape else values.view(())
    for dim in range(1, len(shape)):
        values = values.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
    return values


def _done(value: Any) -> Any:
    found: Future[Any] = Future()
    found.set_result(value)
    return found
