"""One side of a comparison in a process of its own: the module reads its task from a file and prints figures."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchFailed, median, run_command
from benchmarks.record import ROOT

MARK = "FIGURES "
LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Figures:
    """The measurements of a child process.

    seconds, items: of each step after the warm-up; items are useful tokens or pairs. peak_gib: largest resident memory.
    more: figures that only some modules report.
    """

    seconds: list[float]
    items: list[float]
    peak_gib: float
    more: Mapping[str, Any]
    cpu_seconds_per_second: float

    @property
    def rate(self) -> float:
        """Items per second over all measured steps."""
        return sum(self.items) / sum(self.seconds)


def measure(module: str, task: Mapping[str, Any], *, python: Path | None = None, ranks: int = 1) -> Figures:
    """Run `python -m module FILE` on a task. Raises BenchFailed if the process fails or prints no figures."""
    with tempfile.TemporaryDirectory(prefix="zerochat-peers-") as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps({**task, "folder": folder}))
        command = [str(python or sys.executable)]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        finished = run_command([*command, "-m", module, str(file)], folder=ROOT, limit=LIMIT_SECONDS)
    lines = [line for line in finished.output.splitlines() if line.startswith(MARK)]
    if not lines:
        tail = "\n".join(finished.output.splitlines()[-20:])
        raise BenchFailed(f"{module} printed no figures:\n{tail}")
    printed = json.loads(lines[-1].removeprefix(MARK))
    figures = Figures(
        printed.pop("seconds"), printed.pop("items"), printed.pop("peak_gib"), printed, finished.cpu_seconds_per_second
    )
    print(
        f"{module.rpartition('.')[2]} {task['precision']} {task.get('layout', '')}: {figures.rate:.4g} per second, "
        f"{finished.seconds:.0f} s in total",
        file=sys.stderr,
        flush=True,
    )
    return figures


def memory_and_load(ours: Sequence[Figures], peer: Sequence[Figures]) -> dict[str, float]:
    """Return the medians of both sides' peak memory, and of the CPU seconds per second of our side."""
    return {
        "peak_gib": median([figures.peak_gib for figures in ours]),
        "peer_peak_gib": median([figures.peak_gib for figures in peer]),
        "run_cpu_seconds_per_second": median([figures.cpu_seconds_per_second for figures in ours]),
    }


def report(seconds: Sequence[float], items: Sequence[float], **more: Any) -> None:
    """Print the figures of this child process."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(MARK + json.dumps({"seconds": list(seconds), "items": list(items), "peak_gib": peak, **more}), flush=True)


def report_phases(steps: Sequence[Mapping[str, float]], task: Mapping[str, Any]) -> None:
    """Print the figures of PPO iterations from the seconds of each phase, without the warm-up."""
    measured = steps[task["warmup"] :]
    phases = {name: median([step[name] for step in measured]) for name in measured[0]}
    tokens = float(len(task["prompts"]) * task["new_tokens"])
    report([sum(step.values()) for step in measured], [tokens] * len(measured), phases=phases)


def read_task() -> dict[str, Any]:
    """Return the task of this child process."""
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return task
