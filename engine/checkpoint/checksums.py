"""Checksums of the files of a checkpoint. A load compares them before it reads anything.

    checksums.json    {file name: {"bytes": size, "xxh3_128": hexadecimal digest}}, written last

XXH3 runs at the speed of memory. It detects disks, copies and editors that change a file, not forgery.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from engine.parallel import dist

CHECKSUMS = "checksums.json"


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


def write_text(path: Path, text: str) -> Checksum:
    """Write a new file, wait until the disk has it, and return its checksum. Raises OSError."""
    path.write_text(text, encoding="utf-8")
    return checksum_of(path, sync=True)


def write_checksums(folder: Path, checksums: Mapping[str, Checksum]) -> None:
    """Write checksums.json. Raises OSError."""
    write_text(folder / CHECKSUMS, json.dumps({name: asdict(checksum) for name, checksum in checksums.items()}))


def verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its checksum. Each rank reads its share of the files.

    Raises Damaged on every rank if a file differs, or if a file that a load reads has no checksum.
    """
    expected, reason = dist.broadcast_object(_read_checksums(folder))
    names = list(expected)[dist.world().rank :: dist.world().size]
    differences = (_difference(folder / name, expected[name]) for name in names)
    reasons = dist.gather_objects(reason or next((found for found in differences if found), None))
    reason = next((found for found in reasons if found), None)
    if reason is not None:
        raise Damaged(folder, reason)


def checksum_of(path: Path, *, sync: bool = False) -> Checksum:
    """Read a file and return its checksum. `sync` waits until the disk has the file. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, xxhash.xxh3_128)  # type: ignore[arg-type]
        if sync:  # leaves the page cache to the training data
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return Checksum(file.tell(), digest.hexdigest())


def _read_checksums(folder: Path) -> tuple[dict[str, Checksum], str | None]:
    """Return the content of checksums.json, or the reason why it cannot be read."""
    try:
        content = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        checksums = {Path(name).name: Checksum(int(c["bytes"]), str(c["xxh3_128"])) for name, c in content.items()}
        read = {path.name for suffix in ("json", "safetensors") for path in folder.glob(f"*.{suffix}")} - {CHECKSUMS}
        unlisted = min((read | {"state.json"}) - checksums.keys(), default=None)
        return checksums, None if unlisted is None else f"{CHECKSUMS} has no checksum of {unlisted}"
    except FileNotFoundError:
        missing = f"{CHECKSUMS} is missing (zerochat 0.1 wrote checkpoints of another format)"
        return {}, missing if folder.is_dir() else "there is no such folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return {}, f"{CHECKSUMS} cannot be read ({problem})"


def _difference(path: Path, expected: Checksum) -> str | None:
    """Return how a file differs from its checksum. None if it is the same."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{path.name} has {size} bytes, was written with {expected.bytes}"
        return None if checksum_of(path) == expected else f"{path.name} has other bytes than were written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as problem:
        return f"{path.name} cannot be read ({problem.strerror or problem})"
