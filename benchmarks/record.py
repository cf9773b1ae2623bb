"""Results and their file, benchmarks/results.jsonl: one object per case and run. Runs only append to the file."""

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results.jsonl"


@dataclass(frozen=True)
class Result:
    """One case of one benchmark: our figure and the peer's, if there is a peer. `ratio` is ours / peer."""

    bench: str
    case: str
    ours: float
    unit: str
    lower_is_better: bool
    peer: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.peer else None

    def to_object(self) -> dict[str, Any]:
        """Return the JSON object of this case."""
        names = ("bench", "case", "ours", "peer", "ratio", "unit", "lower_is_better", "detail")
        values = {**asdict(self), "ratio": self.ratio}
        return {name: _rounded(values[name]) for name in names}


@dataclass(frozen=True)
class Record:
    """A result with its date, commit and machine."""

    date: str
    commit: str
    machine: Mapping[str, Any]
    result: Result


def append(results: Iterable[Result], machine: Mapping[str, Any], path: Path = RESULTS) -> None:
    """Append `results` to the file, with the current time, the commit and the machine."""
    stamp = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "machine": _rounded(dict(machine)),
    }
    with path.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps({**stamp, **result.to_object()}) + "\n" for result in results)


def read(path: Path = RESULTS) -> list[Record]:
    """Return all records of the file, oldest first, or an empty list if the file is missing."""
    if not path.exists():
        return []
    return [_record(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _record(row: Mapping[str, Any]) -> Record:
    names = ("bench", "case", "ours", "unit", "lower_is_better", "peer", "detail")
    return Record(row["date"], row["commit"], row["machine"], Result(**{name: row[name] for name in names}))


def commit() -> str:
    """Return the short hash of HEAD, with "+" if tracked files other than the results have changes."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD").strip()
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed.strip() else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _rounded(value: Any) -> Any:
    """Round floats to five significant digits; further digits are noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
