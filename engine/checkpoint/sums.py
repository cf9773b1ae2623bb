"""Sums over the files of a checkpoint, by which one that was damaged is known before anything is read from it.

    sums.json    {name of a file: {"bytes", "sum"}}, written last

A sum is the CRC-32 of the sums (of 64-bit numbers, modulo 2^64) of the file's blocks, the last filled up with zeros: a
processor adds up numbers as fast as its memory gives them, and no compiler is needed. Made against disks, copies and
editors, not against forgers.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from engine.offload.blocks import BLOCK_BYTES, BlockFile, aligned, bytes_of
from engine.parallel import dist

SUMS = "sums.json"
REQUEST_BYTES = 8 * 2**20


class Damaged(OSError):
    """A checkpoint is not as it was written. `reason` says in what."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"the checkpoint {folder} is damaged: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Sum:
    """What is known of a file's content."""

    bytes: int
    sum: int


class RunningSum:
    """The sum of a file that comes in pieces, each of whole blocks."""

    def __init__(self) -> None:
        self._bytes = self._sum = 0

    def add(self, view: memoryview) -> None:
        """The next bytes."""
        blocks = np.frombuffer(view, np.uint64).reshape(-1, BLOCK_BYTES // 8)
        self._sum = zlib.crc32(blocks.sum(axis=1, dtype=np.uint64).tobytes(), self._sum)
        self._bytes += len(view)

    @property
    def value(self) -> Sum:
        return Sum(self._bytes, self._sum)


def sum_of(path: Path) -> Sum:
    """Of a file as it is on the disk. Raises OSError."""
    size, running = path.stat().st_size, RunningSum()
    file = BlockFile(path, what=path.name)
    try:
        room = bytes_of(aligned(REQUEST_BYTES, torch.uint8))
        for start in range(0, size, REQUEST_BYTES):
            count = min(REQUEST_BYTES, size - start)
            filled = -count % BLOCK_BYTES
            file.transfer(os.preadv, room[:count], start)
            room[count : count + filled] = bytes(filled)
            running.add(room[: count + filled])
    finally:
        file.close()
    return Sum(size, running.value.sum)


def write_sums(folder: Path, known: Mapping[str, Sum]) -> None:
    """Of all files of a folder that is complete; those that are not `known` are read, when they are on the disk."""
    sums = dict(known)
    for path in sorted(folder.iterdir()):
        if path.name not in sums:
            _to_disk(path)
            sums[path.name] = sum_of(path)
    (folder / SUMS).write_text(json.dumps({name: asdict(found) for name, found in sums.items()}))
    _to_disk(folder / SUMS)


def require_undamaged(folder: Path) -> None:
    """Raises Damaged, on every rank where one found something. Every rank calls, and reads its share of the files."""
    expected, reason = dist.broadcast_object(_expected(folder))
    mine = list(expected.items())[dist.world().rank :: dist.world().size]
    reasons = (_reason(folder / name, wanted) for name, wanted in mine)
    found = dist.gather_objects(reason or next((reason for reason in reasons if reason), None))
    reason = next((reason for reason in found if reason), None)
    if reason is not None:
        raise Damaged(folder, reason)


def _expected(folder: Path) -> tuple[dict[str, Sum], str | None]:
    """What the files should be, or why that can't be told."""
    try:
        said = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        return {Path(name).name: Sum(int(about["bytes"]), int(about["sum"])) for name, about in said.items()}, None
    except FileNotFoundError:
        return {}, f"{SUMS} is missing" if folder.is_dir() else "there is no such folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return {}, f"{SUMS} can't be read ({problem})"


def _reason(path: Path, wanted: Sum) -> str | None:
    """What is wrong with a file; None if nothing is."""
    try:
        size = path.stat().st_size
        if size != wanted.bytes:
            return f"{path.name} has {size} bytes, was written with {wanted.bytes}"
        return None if sum_of(path) == wanted else f"{path.name} has other bytes than were written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as problem:
        return f"{path.name} can't be read ({problem.strerror or problem})"


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
