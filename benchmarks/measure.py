"""Measurement: compared cases alternate (A B A B) within one run, and medians summarize them.

The speed of a machine drifts during a measurement (heat, other programs, caches). Alternating cases share the drift, so
the ratio of their medians is more reliable than that of two separate measurements.
"""

import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


class BenchFailed(Exception):
    """A measured command failed or exceeded its time limit; the message contains the end of its output."""


@dataclass(frozen=True)
class Command:
    """A finished command: its wall seconds, its CPU seconds (children included) per wall second, and its output."""

    seconds: float
    cpu_seconds_per_second: float
    output: str


def in_turn(cases: Mapping[str, Callable[[], Value]], rounds: int) -> dict[str, list[Value]]:
    """Call each of `cases` once per round, in order; return the results of each case by round."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    results: dict[str, list[Value]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, measure in cases.items():
            results[name].append(measure())
    return results


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> float:
    """Return the difference between the largest and the smallest value, divided by the median."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def medians_by_name(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each name over the tables that contain it, in order of first appearance."""
    names = list(dict.fromkeys(name for table in tables for name in table))
    return {name: median([table[name] for table in tables if name in table]) for name in names}


def run_command(arguments: Sequence[str], *, folder: Path, limit: float) -> Command:
    """Run a command in `folder` for at most `limit` seconds. Raises BenchFailed if it fails."""
    cpu_before, start = _children_cpu_seconds(), time.monotonic()
    try:
        finished = subprocess.run(
            arguments,
            cwd=folder,
            timeout=limit,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as problem:
        raise BenchFailed(f"{' '.join(arguments)} did not end within {limit:g} seconds") from problem
    seconds = time.monotonic() - start
    if finished.returncode:
        tail = "\n".join(finished.stdout.splitlines()[-20:])
        raise BenchFailed(f"{' '.join(arguments)} ended with status {finished.returncode}:\n{tail}")
    return Command(seconds, (_children_cpu_seconds() - cpu_before) / max(seconds, 1e-9), finished.stdout)


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
