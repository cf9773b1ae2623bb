"""Each side of a comparison in a process of its own: a module that is told its work in a file, and prints figures."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchFailed, run_command
from benchmarks.record import ROOT

MARK = "FIGURES "
LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Figures:
    """What a child measured: seconds and useful items (tokens, pairs) of each step after the first ones, and the rest.

    peak_gib: resident memory at its highest.
    """

    seconds: list[float]
    items: list[float]
    peak_gib: float
    more: Mapping[str, Any]
    cpu_seconds_per_second: float

    @property
    def rate(self) -> float:
        """Items a second over all measured steps."""
        return sum(self.items) / sum(self.seconds)


def measure(module: str, work: Mapping[str, Any], *, python: Path | None = None, ranks: int = 1) -> Figures:
    """Run `python -m module FILE` on some work. Raises BenchFailed where it fails or says nothing."""
    with tempfile.TemporaryDirectory(prefix="zerochat-peers-") as folder:
        told = Path(folder) / "work.json"
        told.write_text(json.dumps({**work, "folder": folder}))
        command = [str(python or sys.executable)]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = run_command([*command, "-m", module, str(told)], folder=ROOT, limit=LIMIT_SECONDS)
    lines = [line for line in done.output.splitlines() if line.startswith(MARK)]
    if not lines:
        tail = "\n".join(done.output.splitlines()[-20:])
        raise BenchFailed(f"{module} printed no figures:\n{tail}")
    found = json.loads(lines[-1].removeprefix(MARK))
    figures = Figures(
        found.pop("seconds"), found.pop("items"), found.pop("peak_gib"), found, done.cpu_seconds_per_second
    )
    print(
        f"{module.rpartition('.')[2]} {work['precision']} {work.get('layout', '')}: {figures.rate:.4g} a second, "
        f"{done.seconds:.0f} s in all",
        file=sys.stderr,
        flush=True,
    )
    return figures


def report(seconds: Sequence[float], items: Sequence[float], **more: Any) -> None:
    """What a child says at its end."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(MARK + json.dumps({"seconds": list(seconds), "items": list(items), "peak_gib": peak, **more}), flush=True)


def told() -> dict[str, Any]:
    """The work that a child was started with."""
    work: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return work
