"""Write files atomically, and report a full or blocked disk in one clear message."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from pipeline.errors import UserError

PLAN = "plan.json"  # the prediction of a stage, in its folder


def write_whole(file: Path, content: str | bytes) -> None:
    """Replace a file atomically, also in a power cut. Text is written as UTF-8."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except BaseException:
        with suppress(OSError):  # a failed disk may be read-only by now; the first error is the cause
            part.unlink()
        raise


def sync(paths: Iterable[Path]) -> None:
    """Wait until the disk has the content of files, and the names in folders."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_plan(folder: Path) -> dict[str, Any]:
    """Return the prediction in a stage's folder; empty if it has none."""
    try:
        record = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


@contextmanager
def explained_disk(folder: Path) -> Iterator[None]:
    """Raise UserError if the disk is full or broken."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        is_full = getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error)
        what = "the disk is full" if is_full else f"writing failed ({error})"
        raise UserError(
            f"{folder}: {what}. The last complete checkpoint is intact. Free some space, or move the run folder to "
            "another disk and set run_dir= to it; then run the same command again to resume"
        ) from error


def ends_within(seconds: float, write: Callable[[], None]) -> bool:
    """Call a function in a thread, and return whether it ended in time: a call never returns from a blocked disk.

    An OSError of the function is ignored.
    """

    def attempt() -> None:
        with suppress(OSError):
            write()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
