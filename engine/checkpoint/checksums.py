"""Checksums of the files of a checkpoint. A load compares them before it reads anything.

    checksums.json    {file name: {"bytes": size, "xxh3_128": hexadecimal digest}}, written last

XXH3 runs at the speed of memory. It detects disks, copies and editors that change a file, not forgery.
"""

import contextlib
import fcntl
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from engine.parallel import dist

CHECKSUMS = "checksums.json"
VERSION_0_1 = "sums.json"  # the checksum file of zerochat 0.1, whose checkpoints have another format
BLOCK_BYTES = 2**23


class Damaged(OSError):
    """A file of a checkpoint differs from what was written. `reason` names the file and the difference."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"the checkpoint {folder} is damaged: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Checksum:
    """The size and the XXH3 digest of a file."""

    bytes: int
    xxh3_128: str


class HashedFile:
    """A new file that is hashed while it is written, past the page cache (O_DIRECT) if the file system can."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(path, flags, 0o644)
        with contextlib.suppress(OSError):  # tmpfs has no direct I/O
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_DIRECT)
        self._block, self._filled = mmap.mmap(-1, BLOCK_BYTES), 0  # starts on a page, as direct I/O needs
        self._hash, self._bytes = xxhash.xxh3_128(), 0

    def write(self, content: memoryview | bytes) -> None:
        """Append bytes. Raises OSError."""
        view = memoryview(content).cast("B")
        while view:
            count = min(len(view), BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def close(self) -> Checksum:
        """Wait until the disk has the content, and return its checksum. Raises OSError."""
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)  # the last block is not full, which direct I/O refuses
        self._flush()
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        return Checksum(self._bytes, self._hash.hexdigest())

    def _flush(self) -> None:
        with memoryview(self._block)[: self._filled] as rest:
            self._hash.update(rest)
            self._bytes += len(rest)
            start = 0
            while start < len(rest):
                start += os.write(self._descriptor, rest[start:])
        self._filled = 0

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)


def write_checksums(folder: Path, checksums: Mapping[str, Checksum]) -> None:
    """Write checksums.json. Raises OSError."""
    file = HashedFile(folder / CHECKSUMS)
    file.write(json.dumps({name: asdict(checksum) for name, checksum in checksums.items()}).encode())
    file.close()


def verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its checksum. Each rank reads its share of the files.

    Raises Damaged on every rank when a rank finds a difference, and ValueError for a checkpoint of zerochat 0.1.
    """
    if dist.broadcast_object((folder / VERSION_0_1).exists() and not (folder / CHECKSUMS).exists()):
        raise ValueError(
            f"{folder} is a checkpoint of zerochat 0.1, whose format this version does not read; finish the run with "
            "zerochat 0.1, or delete the checkpoint to start again from the beginning"
        )
    expected, reason = dist.broadcast_object(_read_checksums(folder))
    names = list(expected)[dist.world().rank :: dist.world().size]
    differences = (_difference(folder / name, expected[name]) for name in names)
    reasons = dist.gather_objects(reason or next((found for found in differences if found), None))
    reason = next((found for found in reasons if found), None)
    if reason is not None:
        raise Damaged(folder, reason)


def checksum_of(path: Path) -> Checksum:
    """Read a file and return its checksum. Raises OSError."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return Checksum(size, digest.hexdigest())


def _read_checksums(folder: Path) -> tuple[dict[str, Checksum], str | None]:
    """The content of checksums.json, or the reason why it cannot be read."""
    try:
        content = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        return {Path(name).name: Checksum(int(c["bytes"]), str(c["xxh3_128"])) for name, c in content.items()}, None
    except FileNotFoundError:
        return {}, f"{CHECKSUMS} is missing" if folder.is_dir() else "there is no such folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return {}, f"{CHECKSUMS} can't be read ({problem})"


def _difference(path: Path, expected: Checksum) -> str | None:
    """How a file differs from its checksum. None if it is the same."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path.name} has {size} bytes, was written with {expected.bytes}"
        return None if checksum_of(path) == expected else f"{path.name} has other bytes than were written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as problem:
        return f"{path.name} can't be read ({problem.strerror or problem})"
