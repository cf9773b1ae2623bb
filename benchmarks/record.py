"""Results and the file that keeps them: benchmarks/results.jsonl, one object a case and run, never rewritten."""

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
    """One case of one bench: our figure, and the peer's where it has one. `ratio` is ours / peer."""

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
        """The JSON object of this case."""
        names = ("bench", "case", "ours", "peer", "ratio", "unit", "lower_is_better", "detail")
        values = {**asdict(self), "ratio": self.ratio}
        return {name: _rounded(values[name]) for name in names}


@dataclass(frozen=True)
class Record:
    """A result with when, from which commit and on what machine it was measured."""

    date: str
    commit: str
    machine: Mapping[str, Any]
    result: Result


def append(results: Iterable[Result], machine: Mapping[str, Any], path: Path = RESULTS) -> None:
    """Add `results` to the file, stamped with the time, the commit and the machine."""
    stamp = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "machine": _rounded(dict(machine)),
    }
    with path.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps({**stamp, **result.to_object()}) + "\n" for result in results)


def read(path: Path = RESULTS) -> list[Record]:
    """All records of the file, oldest first; no file is no records."""
    if not path.exists():
        return []
    return [_record(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _record(row: Mapping[str, Any]) -> Record:
    names = ("bench", "case", "ours", "unit", "lower_is_better", "peer", "detail")
    return Record(row["date"], row["commit"], row["machine"], Result(**{name: row[name] for name in names}))


def commit() -> str:
    """The short hash of the checkout, with a plus where tracked files other than the results were changed."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD").strip()
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed.strip() else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _rounded(value: Any) -> Any:
    """Floats to five significant digits: more is noise, and hard to read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
