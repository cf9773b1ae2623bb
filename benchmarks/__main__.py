"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME [CASE ...]` runs one.

A run prints one JSON object per measured case and appends the object to benchmarks/results.jsonl. At the end it prints
a table of all cases.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from benchmarks.measure import BenchFailed
from benchmarks.record import RESULTS, Result, append

BENCHES = {
    "stages": "benchmarks.stages",
    "rollout": "benchmarks.rollout",
    "serve": "benchmarks.serve",
    "zero": "benchmarks.zero",
    "peers": "benchmarks.peers",
    "dschat": "benchmarks.dschat",
    "kernels": "benchmarks.kernels",
    "demo_seeds": "benchmarks.demo_seeds",
    "demo_methods": "benchmarks.demo_methods",
    "guard_cases": "benchmarks.guard_cases",
    "everyday_inputs": "benchmarks.everyday_inputs",
}


class Bench(Protocol):
    """The interface of a benchmark's module. The first line of its docstring describes what it measures."""

    __doc__: str | None
    CASES: tuple[str, ...]

    def run(self, cases: Sequence[str], rounds: int) -> Iterable[Result]:
        """Measure each of `cases` `rounds` times. Our side and the peer alternate. Raises BenchFailed."""
        ...


def load(name: str) -> Bench:
    """Import the module of a benchmark. The module imports its cases when they run."""
    return cast(Bench, importlib.import_module(BENCHES[name]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="List the benchmarks, or run one.")
    parser.add_argument("name", nargs="?", help="the benchmark to run; without a name, list all of them")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="the cases to run (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case; the sides alternate (default 3)")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: run rollout as python -m benchmarks.gpu ceilings decode profile",
    )
    parser.add_argument("--no-record", action="store_true", help=f"do not append the figures to {RESULTS.name}")
    arguments = parser.parse_args(argv)
    if arguments.name is None:
        print(listing())
        return 0
    if arguments.name not in BENCHES:
        return _refuse(f"there is no benchmark {arguments.name}; choose from: {', '.join(BENCHES)}")
    if arguments.device == "cuda":
        return _on_gpu(arguments.name, arguments.cases)
    if arguments.rounds < 1:
        return _refuse(f"--rounds must be at least 1, not {arguments.rounds}")
    bench = load(arguments.name)
    unknown = [case for case in arguments.cases if case not in bench.CASES]
    if unknown:
        return _refuse(f"{arguments.name} has no case {', '.join(unknown)}; choose from: {', '.join(bench.CASES)}")
    selected = [case for case in bench.CASES if case in arguments.cases or not arguments.cases]
    return _run(bench, selected, arguments.rounds, record=not arguments.no_record)


def _on_gpu(name: str, cases: Sequence[str]) -> int:
    """Run the parts of `benchmarks.gpu` that measure rollouts."""
    if name != "rollout" or cases:
        return _refuse(
            "--device cuda needs rollout without cases; for other GPU measurements type python -m benchmarks.gpu"
        )
    from benchmarks.gpu.__main__ import main as gpu_main

    return gpu_main(["ceilings", "decode", "profile"])


def _run(bench: Bench, cases: Sequence[str], rounds: int, *, record: bool) -> int:
    from benchmarks.machine import describe, quiet_figures

    machine = {**describe(), **quiet_figures()}
    print(json.dumps({"machine": machine}), flush=True)
    results = []
    try:
        for result in bench.run(cases, rounds):
            print(json.dumps(result.to_object()), flush=True)
            results.append(result)
            if record:
                append([result], machine)
    except BenchFailed as problem:
        return _refuse(str(problem))
    print(table(results))
    return 0


def listing() -> str:
    """Return a text with the name, the description and the cases of each benchmark."""
    parts = []
    for name in BENCHES:
        bench = load(name)
        description = (bench.__doc__ or "").strip().splitlines()[0]
        parts.append(f"{name}\n    {description}\n    cases: {', '.join(bench.CASES)}")
    return "\n".join(parts)


def table(results: Sequence[Result]) -> str:
    """Return the results in columns of equal width."""
    rows = [("case", "ours", "peer", "ratio", "unit")]
    rows += [
        (result.case, _figure(result.ours), _figure(result.peer), _figure(result.ratio), result.unit)
        for result in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:4], widths[1:4], strict=True)),
        ]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
