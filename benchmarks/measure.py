"""Measuring: things compared are run in turn (A B A B), in one go, and told by their medians.

A machine's speed drifts while it is measured (heat, neighbours, caches). Runs in turn share the drift,
so that a ratio of two medians is worth more than two figures taken one after the other.
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
    """A measured command failed or took too long; the message shows the end of what it printed."""


@dataclass(frozen=True)
class Command:
    """A command that ran: its wall seconds, and the CPU seconds of it and its children per wall second."""

    seconds: float
    cpu_seconds_per_second: float
    output: str


def in_turn(cases: Mapping[str, Callable[[], Value]], rounds: int) -> dict[str, list[Value]]:
    """Call each of `cases` once a round, in order, `rounds` times; what each returned, in order of rounds."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    results: dict[str, list[Value]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, measure in cases.items():
            results[name].append(measure())
    return results


def median(values: Sequence[float]) -> float:
    """The median of at least one value."""
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> float:
    """Largest less smallest value, as a share of the median: how much to believe the median."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def medians_by_name(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each name over the tables that have it, in order of first appearance."""
    names = list(dict.fromkeys(name for table in tables for name in table))
    return {name: median([table[name] for table in tables if name in table]) for name in names}


def run_command(arguments: Sequence[str], *, folder: Path, limit: float) -> Command:
    """Run a command in `folder` for at most `limit` seconds. Raises BenchFailed where it does not end well."""
    before, began = _children_cpu_seconds(), time.monotonic()
    try:
        done = subprocess.run(
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
    seconds = time.monotonic() - began
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-20:])
        raise BenchFailed(f"{' '.join(arguments)} ended with status {done.returncode}:\n{tail}")
    return Command(seconds, (_children_cpu_seconds() - before) / max(seconds, 1e-9), done.stdout)


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
