"""Writing files: whole or not at all, and one clear message where a disk is full."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import UserError


def write_whole(file: Path, content: str | bytes) -> None:
    """Replace a file, text being UTF-8, so that it is the old or the new one at any moment, also after a power cut."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def explained_disk(folder: Path) -> Iterator[None]:
    """Turn a full or broken disk into one clear message."""
    try:
        yield
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else f"writing failed ({error})"
        raise UserError(
            f"{folder}: {what}. The last whole checkpoint is kept; make room (or choose run_dir= on another disk, "
            "moving the run folder there), then the same command continues"
        ) from error
