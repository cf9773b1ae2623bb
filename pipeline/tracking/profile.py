"""Record some steps of a stage with torch.profiler: a timeline of host and GPU, and the slowest operators.

    folder/profile/steps-5-8-rank-0.json.gz    the trace, for ui.perfetto.dev or chrome://tracing
    folder/profile/steps-5-8-rank-0.txt        the heaviest operators, and kernels on a GPU

Phases of the stage (train, generate, ...) are spans of the trace. The own time of a span is the time outside of
PyTorch's operators: Python, waiting, and kernels that are called without PyTorch. Recording slows a step down, most of
all with small operators.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from pipeline.distributed import is_rank_zero, rank
from pipeline.files import explained_disk

ROWS, LONGEST_NAME = 25, 120  # kernel names contain all template arguments
MICROSECONDS = 1e6


class Profile:
    """Records this rank from the beginning of step `first` to the end of step `last`."""

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self._folder, self._first, self._last = folder / "profile", first, last
        self._began = 0
        self._recorder: Any = None

    def expect(self, first: int, last: int) -> None:
        """Print a message on rank 0 if none of the steps [first, last] that the stage will run is to be recorded."""
        if (first > self._last or last < self._first) and is_rank_zero():
            steps = f"{self._first} to {self._last} (profile.steps)"
            print(f"{self._folder.parent.name}: none of the steps {steps} is left to record", flush=True)

    def begin(self, step: int) -> None:
        """Start the recorder if `step` is to be recorded. A stage that resumes between the two steps starts there."""
        if self._recorder is None and self._first <= step <= self._last:
            from torch.profiler import ProfilerActivity, profile

            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences its library, which reads this at first use
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._began, self._recorder = step, profile(activities=kinds)
            self._recorder.start()

    def end(self, step: int, *, final: bool) -> None:
        """Stop the recorder and write the files after the last step to record, or after the stage's `final` step."""
        if self._recorder is None or (step < self._last and not final):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        recorder, self._recorder = self._recorder, None
        recorder.stop()
        name = f"steps-{self._began}-{step}-rank-{rank()}"
        with explained_disk(self._folder):
            self._folder.mkdir(exist_ok=True)
            recorder.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            text = tables(recorder.key_averages(), steps=step - self._began + 1)
            (self._folder / f"{name}.txt").write_text(text, encoding="utf-8")
        if is_rank_zero():
            recorded = f"steps {self._began} to {step} recorded, {self._folder / name}.txt"
            print(f"{self._folder.parent.name}: {recorded}", flush=True)


def tables(events: Iterable[Any], *, steps: int) -> str:
    """Return a text table of the slowest operators on the host, and one of the slowest GPU kernels if any ran."""
    host: dict[str, tuple[float, int]] = {}
    device: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.device_type == DeviceType.CPU:
            host[event.key] = (event.self_cpu_time_total / MICROSECONDS, event.count)
        elif not event.is_user_annotation:  # the time of a span on the device repeats the time of its kernels
            device[event.key] = (event.self_device_time_total / MICROSECONDS, event.count)
    span = f"{steps} step{'s' if steps > 1 else ''}"
    parts = [_table(f"operators on the host, own time over {span}", host)]
    return "\n".join([*parts, *([_table(f"kernels on the device over {span}", device)] if device else [])])


def _table(title: str, rows: dict[str, tuple[float, int]]) -> str:
    total = sum(seconds for seconds, _ in rows.values())
    lines = [f"{title}: {total:.3f} s", f"{'seconds':>10} {'%':>5} {'calls':>8}"]
    for name, (seconds, calls) in sorted(rows.items(), key=lambda row: row[1][0], reverse=True)[:ROWS]:
        lines.append(f"{seconds:10.4f} {100 * seconds / total if total else 0:5.1f} {calls:8}  {name[:LONGEST_NAME]}")
    return "\n".join(lines) + "\n"
