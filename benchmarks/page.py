"""`python -m benchmarks.page` generates docs/engineering/benchmarks.md from benchmarks/results.jsonl."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.__main__ import BENCHES
from benchmarks.record import ROOT, Record, read

PAGE = ROOT / "docs" / "engineering" / "benchmarks.md"
INTRODUCTION = """# Benchmarks

`python -m benchmarks.page` generates this page from `benchmarks/results.jsonl`. Do not edit the page.

`python -m benchmarks` lists the benchmarks. `python -m benchmarks NAME` runs one and appends its figures to the file.
The docstring of `benchmarks/NAME.py` or `benchmarks/NAME/__init__.py` has the details.

The page shows the newest run of each case and kind of machine. The demo's scores depend on its data and recipe more
than on the machine, so the page shows only the newest run of their cases. `results.jsonl` has all runs, with their
single rounds, the seconds of each phase, and the load of the machine.

- `ours` and `peer` are medians over the rounds of a run. The compared sides alternate. `against` names the peer.
- `ratio` is `ours` divided by `peer`. Less is better if the unit ends in ↓.
- `spread` is the difference between the largest and the smallest value, divided by the median.
- `GFLOP/s` is the speed of a fixed matrix product in bf16, measured before the run. Virtual machines with the same name
  of the processor differ in it. `bf16` is fast if this product is at least twice as fast as in fp32.
- A plus sign after a commit marks changes that were not committed.
- `ours` and `greedy` of the demo's benchmarks are gold scores at temperature 1 and 0.
"""
DEMO = ("guard_cases", "demo_methods", "demo_seeds", "everyday_inputs")
DETAILS = {
    "peer": "against",
    "spread": "spread",
    "peak_gib": "peak GiB",
    "peer_peak_gib": "peer's peak GiB",
    "peak_host_gib_a_rank": "peak GiB a rank",
    "peak_gib_a_rank": "peak GiB a rank",
    "peer_peak_gib_a_rank": "peer's peak GiB",
    "SFT": "SFT",
    "SFT_sampled": "SFT",
    "change": "change from SFT",
    "change_sampled": "change from SFT",
    "change_from_best": "less best of 4",
    "from_best_sampled": "less best of 4",
    "SFT_greedy": "SFT, greedy",
    "greedy": "greedy",
    "change_greedy": "change, greedy",
    "signs": "signs",
    "exported_step": "exported step",
}


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(read()), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


def render(records: Sequence[Record]) -> str:
    """Return the page of `records`, in Markdown."""
    if not records:
        return f"{INTRODUCTION}\nNothing has been measured yet.\n"
    shown = newest(records)
    machines = list(dict.fromkeys(machine_kind(record) for record in shown))
    letters = {kind: chr(ord("A") + place) for place, kind in enumerate(machines)}
    head = ["machine", "processor", "cores", "GiB", "bf16", "GPUs"]
    parts = [INTRODUCTION, "\n", markdown_table(head, [[letters[kind], *kind] for kind in machines])]
    for bench in dict.fromkeys(record.result.bench for record in shown):
        rows = [_row(record, letters[machine_kind(record)]) for record in shown if record.result.bench == bench]
        parts.append(f"\n## {bench}\n\n{_description(bench)}\n\n{_table(rows)}")
    return "".join(parts)


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each case and kind of machine, in order of the cases' first appearance.

    Of the cases of `DEMO`, return the last record of all machines.
    """
    latest: dict[tuple[str, str], dict[tuple[str, ...], Record]] = {}
    for record in records:
        bench = record.result.bench
        latest.setdefault((bench, record.result.case), {})[() if bench in DEMO else machine_kind(record)] = record
    return [record for by_machine in latest.values() for record in by_machine.values()]


def machine_kind(record: Record) -> tuple[str, ...]:
    """Return processor, cores, memory, speed of bf16 products and GPUs, without figures that change between runs."""
    machine = record.machine
    gpus: list[str] = machine.get("gpus") or []
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    # Virtual machines do not report the model, and processors with and without fast bf16 have the same name.
    bf16, fp32 = machine.get("matmul_bf16_gflops"), machine.get("matmul_fp32_gflops")
    speed = ("fast" if bf16 > 2 * fp32 else "slow") if bf16 and fp32 else ""
    texts = [str(machine.get(name)) for name in ("cpu", "cores", "memory_gib")]
    return (*texts, speed, counted or "none")


def _description(bench: str) -> str:
    """Return the first line of the benchmark's docstring and its list of cases."""
    spec = find_spec(BENCHES[bench])
    assert spec and spec.origin
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    first, *rest = docstring.split("\n\n")
    return "\n\n".join([first, *(paragraph for paragraph in rest if paragraph.startswith("    "))])


def _row(record: Record, machine: str) -> dict[str, str]:
    """Return the cells of one record by column."""
    result = record.result
    details = {title: result.detail[name] for name, title in DETAILS.items() if name in result.detail}
    speed = {"ratio": _text(result.ratio), "GFLOP/s": _text(record.machine.get("matmul_bf16_gflops"))}
    return {
        "case": result.case,
        "machine": machine,
        "ours": _text(result.ours),
        "peer": _text(result.peer),
        **({} if result.bench in DEMO else speed),
        "unit": f"{result.unit} ↓" if result.lower_is_better else result.unit,
        **{title: _text(value) for title, value in details.items() if isinstance(value, int | float | str)},
        "torch": str(record.machine.get("torch")),
        "date": record.date.split()[0],
        "commit": record.commit,
    }


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table of `rows`. A column with the same value in all rows becomes a line above the table."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if any(row.get(name) for row in rows)]
    common = [name for name in columns if len({row.get(name) for row in rows}) == 1 and name not in ("case", "ours")]
    columns = [name for name in columns if name not in common]
    line = "; ".join(f"{name}: {rows[0][name]}" for name in common)
    table = markdown_table(columns, [[row.get(name, "") for name in columns] for row in rows])
    return f"In all rows, {line}.\n\n{table}" if common else table


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown: the first column aligned left, the others right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n" for cells in lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    main()
