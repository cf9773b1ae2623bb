"""Read JSON and YAML files of a run, write files atomically, and report a full or blocked disk in one clear message."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from pipeline.errors import UserError

PLAN = "plan.json"  # the prediction of a stage, in its folder
Record = TypeVar("Record")


def write_atomically(file: Path, content: str | bytes) -> None:
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
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or has no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def summary_metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the model of a summary.json: those of its top level, and of the last step ("final").

    If the stage exported an earlier step, the metrics of the last step are those of another model, and are left out.
    """
    final, last = summary.get("final"), summary.get("steps")
    is_last = summary.get("exported_step", last) == last
    return {**(final if is_last and isinstance(final, dict) else {}), **summary}


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file; none if the file is missing. A line that is no object gives an empty one.

    A killed process or a full disk may have cut a line anywhere, also inside a character.
    """
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError
                row = {}
            yield row if isinstance(row, dict) else {}


def read_plan(folder: Path) -> dict[str, Any]:
    """Return the prediction in a stage's folder; empty if it has none."""
    return read_object(folder / PLAN)


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document. libyaml, where PyYAML has it, parses a configuration in 5 ms, not 40."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_settings(stage_dir: Path) -> dict[str, Any]:
    """Return the settings in the config.yaml of a stage; empty if the file is missing or damaged."""
    try:
        settings = load_yaml((stage_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def read_record(file: Path, kind: type[Record], *, remedy: str) -> Record | None:
    """Return the content of a JSON file as a dataclass or a pydantic model; None without a file.

    Another program or an editor may have written the file: types are strict. Raises UserError with the first mistake
    and the remedy.
    """
    try:
        return TypeAdapter(kind).validate_json(file.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        reason = str(problem)
        if isinstance(problem, ValidationError):
            first = problem.errors()[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'the content'}: {first['msg']}"
        raise UserError(f"{file} cannot be read ({reason}): {remedy}") from problem


@contextmanager
def explained_disk(folder: Path) -> Iterator[None]:
    """Raise UserError if the disk is full or broken, or if the folder is gone."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is gone: its disk is no longer mounted, or the folder was removed. Restore it, then run the "
                "same command again to resume; without the folder the command starts again"
            ) from error
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
