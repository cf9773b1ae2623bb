"""The measurements of a running stage: metrics.jsonl, seconds by phase, bytes by owner, and recorded steps."""

import json
import math
import mmap
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function

from engine import Engine, distributed
from pipeline import progress
from pipeline.config.schema import ProfileSection
from pipeline.files import explained_disk

WORK = ("flip", "generate", "score", "train")  # the phases that count for tokens per second
RESTING = ("parameters", "optimizer", "average")  # owners whose bytes an engine holds between steps
SHARED_PHASES = ("generate", "score")  # phases with the same name for all engines
# Owners whose bytes an engine may hold while another engine works: offloaded states and memory for generation.
HELD_MEANWHILE = ("host", "nvme", "inference_model", "prepacked_linears", "cache")

PROFILE_ROWS, LONGEST_NAME = 25, 100  # kernel names contain all template arguments


def append(path: Path, line: Mapping[str, float | str]) -> None:
    """Append the metrics of a step to metrics.jsonl. Numbers that are not finite become null."""
    with explained_disk(path.parent), path.open("a") as file:
        values = {name: value if isinstance(value, str) else plain(value) for name, value in line.items()}
        file.write(json.dumps(values) + "\n")


def cut(path: Path, step: int) -> None:
    """Remove the lines after `step` from a JSONL file with a `step` in each line; step 0 removes all lines.

    A killed run may have logged steps after its last checkpoint. The resumed run repeats these steps. A full disk may
    have cut a line anywhere, also inside a character. Such lines at the end are removed, too. Only the end is read,
    because rollouts.jsonl may have gigabytes.
    """
    if path.exists():
        os.truncate(path, _bytes_until(path, step))


def _bytes_until(path: Path, step: int) -> int:
    """Return the number of bytes up to the last line of a step that is at most `step`."""
    end = path.stat().st_size
    if step == 0 or end == 0:  # an empty file cannot be mapped
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while end:
            begin = content.rfind(b"\n", 0, end - 1) + 1
            with suppress(ValueError, KeyError, TypeError):  # invalid UTF-8 is a ValueError
                if content[end - 1 : end] == b"\n" and json.loads(content[begin:end])["step"] <= step:
                    break
            end = begin
    return end


def plain(value: float) -> float | int | None:
    """Return the number that JSON can represent: `value`, or None for NaN and infinity."""
    return value if math.isfinite(value) else None


class Clock:
    """Seconds by phase since the first step of the stage, over all starts. The stage adds to `tokens`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens = 0
        self._phase: str | None = None  # the newest phase
        self.begin_lap()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the wall time of the context under a name.

        When a phase with another name begins, the host first waits for the GPU, and the earlier phase counts this time.
        Otherwise the host does not wait, and can prepare the next step while the GPU computes.
        """
        if torch.cuda.is_available() and self._phase not in (None, name):
            with self._counted(str(self._phase)):
                torch.cuda.synchronize()
        self._phase = name
        with progress.own().phase(name), self._counted(name), record_function(name):  # a span in the profile, if any
            yield

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count some seconds of one phase under another name."""
        self.seconds[source] = self.seconds.get(source, 0.0) - seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def begin_lap(self) -> None:
        """Start a new lap at the current time."""
        self._lap, self._lap_tokens = dict(self.seconds), self.tokens

    def lap(self) -> dict[str, float]:
        """Return the seconds by phase since the last lap, as `NAME_seconds`, and the tokens per second."""
        spent = {name: total - self._lap.get(name, 0.0) for name, total in self.seconds.items() if name in WORK}
        tokens = self.tokens - self._lap_tokens
        self.begin_lap()
        return {f"{name}_seconds": round(seconds, 4) for name, seconds in spent.items()} | {
            "tokens_per_second": _rate(tokens, sum(spent.values()))
        }

    def rate(self) -> float:
        """Return the tokens per second over all starts."""
        return _rate(self.tokens, sum(seconds for name, seconds in self.seconds.items() if name in WORK))


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / max(seconds, 1e-9), 1)


def measured_memory(engines: Mapping[str, Engine]) -> dict[str, dict[str, int]]:
    """Return this rank's bytes by owner at the peak of each phase.

    With one engine, phases and owners are those of its memory tracker. With several engines, a phase has a name such as
    "train actor", and the bytes that an engine holds between steps have its name as the owner. While one engine trains,
    the engines after it may hold forwards that wait for their backward.
    """
    if len(engines) == 1:
        (engine,) = engines.values()
        return {phase: dict(owners) for phase, owners in engine.memory_tracker.peaks.items()}
    holdings = {name: engine.memory_tracker.holdings() for name, engine in engines.items()}
    resting = {name: sum(owners.get(owner, 0) for owner in RESTING) for name, owners in holdings.items()}
    peaks_by_phase: dict[str, dict[str, int]] = {}
    for index, (name, engine) in enumerate(engines.items()):
        others = Counter[str]()
        for other, owners in holdings.items():
            if other != name:
                others.update({owner: owners[owner] for owner in HELD_MEANWHILE if owners.get(owner)})
        waiting = Counter[str]()
        for later in [*engines.values()][index + 1 :]:
            waiting.update(later.memory_tracker.waiting)
        for phase, owners in engine.memory_tracker.peaks.items():
            sizes = Counter({owner: size for owner, size in owners.items() if owner not in RESTING})
            sizes.update(others)
            if phase == "train":
                sizes.update(waiting)
            label = phase if phase in SHARED_PHASES else f"{phase} {name}"
            peaks = peaks_by_phase.setdefault(label, dict(resting))
            for owner, size in sizes.items():
                peaks[owner] = max(size, peaks.get(owner, 0))
    return peaks_by_phase


def peak_memory() -> dict[str, int]:
    """Return this rank's peak: bytes on the device (allocated by torch) and resident on the host."""
    device_bytes = torch.cuda.max_memory_allocated() if distributed.world().device.type == "cuda" else 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    host_bytes = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rank": distributed.world().rank, "device_bytes": device_bytes, "host_bytes": host_bytes}


def profiled(planned: range, goes_on: Callable[[int], bool], folder: Path, section: ProfileSection) -> Iterator[int]:
    """Yield the planned steps of a stage until one that `goes_on` rejects.

    The steps of `profile.steps` are recorded with torch.profiler, on the first rank or on all.

    folder/profile/steps-5-8-rank-0.json.gz: the trace, for ui.perfetto.dev or chrome://tracing
    folder/profile/steps-5-8-rank-0.txt: the slowest operators, and kernels on a GPU

    A stage that resumes between the two steps, or ends there, records fewer of them. Phases of the stage (train,
    generate, ...) are spans of the trace. The own time of a span is the time outside of PyTorch's operators: Python,
    waiting, and kernels that are called without PyTorch. Recording slows a step down.
    """
    steps = takewhile(goes_on, planned)
    if section.steps is None or (section.ranks == "first" and not distributed.is_rank_zero()):
        yield from steps
        return
    first, last = section.steps
    if not range(max(first, planned.start), min(last + 1, planned.stop)) and distributed.is_rank_zero():
        print(f"{folder.name}: none of the steps {first} to {last} (profile.steps) is left to record", flush=True)
    recorder: Any = None
    recorded: list[int] = []
    for step in steps:
        if first <= step <= last:
            recorder = recorder or _start_recorder()
            recorded.append(step)
        yield step
        if step == last:
            break
    if recorder is not None:
        _write_profile(recorder, folder / "profile", f"{recorded[0]}-{recorded[-1]}")
    yield from steps


def _start_recorder() -> Any:
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences its library, which reads this at first use
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    recorder = profile(activities=kinds)
    recorder.start()
    return recorder


def _write_profile(recorder: Any, folder: Path, steps: str) -> None:
    """Stop torch.profiler and write the files of some steps."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    recorder.stop()
    name = f"steps-{steps}-rank-{distributed.world().rank}"
    with explained_disk(folder):
        folder.mkdir(exist_ok=True)
        recorder.export_chrome_trace(str(folder / f"{name}.json.gz"))
        (folder / f"{name}.txt").write_text(_tables(recorder.key_averages()), encoding="utf-8")
    if distributed.is_rank_zero():
        recorded = steps.replace("-", " to ")
        print(f"{folder.parent.name}: steps {recorded} recorded, {folder / name}.txt", flush=True)


def _tables(averages: Any) -> str:
    """Return torch.profiler's table of the slowest operators on the host, and on a GPU the table by device time."""
    keys = ["self_cpu_time_total", *(["self_device_time_total"] if torch.cuda.is_available() else [])]
    return "\n".join(
        averages.table(sort_by=key, row_limit=PROFILE_ROWS, max_name_column_width=LONGEST_NAME) for key in keys
    )
