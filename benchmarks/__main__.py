"""`python -m benchmarks` lists the benches; `python -m benchmarks NAME [CASE ...]` runs one.

A run prints one JSON object a case as soon as the case is measured, and adds the object to benchmarks/results.jsonl. A
table of all cases comes last.
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
    "zero": "benchmarks.zero",
    "peers": "benchmarks.peers",
    "dschat": "benchmarks.dschat",
    "kernels": "benchmarks.kernels",
}


class Bench(Protocol):
    """What a bench's module offers, beside a docstring whose first line says what it measures."""

    __doc__: str | None
    CASES: tuple[str, ...]

    def run(self, cases: Sequence[str], rounds: int) -> Iterable[Result]:
        """Measure `cases`, each `rounds` times. Ours and the peer alternate. Raises BenchFailed."""
        ...


def load(name: str) -> Bench:
    """The module of a bench; it imports what is heavy only when it runs."""
    return cast(Bench, importlib.import_module(BENCHES[name]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="List the benches, or run one.")
    parser.add_argument("name", nargs="?", help="the bench to run; without it, they are listed")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="the cases to run; all of them by default")
    parser.add_argument("--rounds", type=int, default=3, help="times each case is run, in turn (default 3)")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: rollouts on a GPU, as python -m benchmarks.gpu ceilings decode profile",
    )
    parser.add_argument("--no-record", action="store_true", help=f"don't add the figures to {RESULTS.name}")
    arguments = parser.parse_args(argv)
    if arguments.name is None:
        print(listing())
        return 0
    if arguments.name not in BENCHES:
        return _refuse(f"there is no bench {arguments.name}; there are: {', '.join(BENCHES)}")
    if arguments.device == "cuda":
        return _on_gpu(arguments.name, arguments.cases)
    if arguments.rounds < 1:
        return _refuse(f"--rounds must be at least 1, not {arguments.rounds}")
    bench = load(arguments.name)
    unknown = [case for case in arguments.cases if case not in bench.CASES]
    if unknown:
        return _refuse(f"{arguments.name} has no case {', '.join(unknown)}; it has: {', '.join(bench.CASES)}")
    wanted = [case for case in bench.CASES if case in arguments.cases or not arguments.cases]
    return _run(bench, wanted, arguments.rounds, record=not arguments.no_record)


def _on_gpu(name: str, cases: Sequence[str]) -> int:
    """What a GPU is asked of rollouts; its cases are its own."""
    if name != "rollout" or cases:
        return _refuse("--device cuda is for rollout as a whole; python -m benchmarks.gpu has what else wants a GPU")
    from benchmarks.gpu.__main__ import main as on_gpu

    return on_gpu(["ceilings", "decode", "profile"])


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
    """Each bench with what it measures and its cases."""
    parts = []
    for name in BENCHES:
        bench = load(name)
        about = (bench.__doc__ or "").strip().splitlines()[0]
        parts.append(f"{name}\n    {about}\n    cases: {', '.join(bench.CASES)}")
    return "\n".join(parts)


def table(results: Sequence[Result]) -> str:
    """The results in columns of equal width."""
    rows = [("case", "ours", "peer", "ratio", "unit")]
    rows += [
        (result.case, _figure(result.ours), _figure(result.peer), _figure(result.ratio), result.unit)
        for result in results
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
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
