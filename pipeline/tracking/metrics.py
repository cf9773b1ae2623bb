"""The metrics file of a stage: a line a step, JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from pipeline.files import explained_disk, write_whole


def append(path: Path, line: Mapping[str, float]) -> None:
    """Add a step's figures; what is not finite becomes null."""
    with explained_disk(path.parent), path.open("a") as file:
        file.write(json.dumps({name: plain(value) for name, value in line.items()}) + "\n")


def cut(path: Path, step: int) -> None:
    """Drop lines after `step`: steps that a killed run had logged and will do again. From step 0 all is done again.

    Of any file whose lines are JSON objects with a `step`.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").split("\n"):  # answers may hold other signs that end a line
        try:
            if 0 < step >= json.loads(line)["step"]:
                kept.append(line)
        except (json.JSONDecodeError, KeyError):
            continue
    write_whole(path, "".join(line + "\n" for line in kept))


def plain(value: float) -> float | int | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
