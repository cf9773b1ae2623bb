"""`python -m benchmarks.page` generates docs/engineering/benchmarks.md from benchmarks/results.jsonl."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.record import ROOT, Record, read

PAGE = ROOT / "docs" / "engineering" / "benchmarks.md"
INTRODUCTION = """# Benchmarks

`python -m benchmarks.page` generates this page from `benchmarks/results.jsonl`. Do not edit the page.

`python -m benchmarks` lists the benchmarks. `python -m benchmarks NAME` runs one and appends its figures to the file.
The page shows the newest run of each case on each machine.

How to read the tables:

- `ours` and `peer` are medians over the rounds of a run. The compared sides alternate.
- `ratio` is `ours` divided by `peer`.
- `against` names the peer. `other` has the figures that few cases have.
- `spread` is the difference between the largest and the smallest value, divided by the median.
- `matmul bf16 GFLOP/s` is the speed of a fixed matrix product on this machine, measured before the run.
- `CPU s per s` is the CPU time that this product received per second. It is close to the number of threads if no other
  program runs. Do not rely on figures with a much smaller value.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(read()), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


def render(records: Sequence[Record]) -> str:
    """Return the page of `records`, in Markdown."""
    if not records:
        return f"{INTRODUCTION}\nNothing has been measured yet.\n"
    parts = [INTRODUCTION]
    for bench in dict.fromkeys(record.result.bench for record in records):
        parts.append(f"\n## {bench}\n")
        latest = newest([record for record in records if record.result.bench == bench])
        for machine in dict.fromkeys(_machine_text(record.machine) for record in latest):
            group = [record for record in latest if _machine_text(record.machine) == machine]
            parts.append(f"\n{machine}\n\n{_figures_table(group)}{_detail_tables(group)}")
    return "".join(parts)


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each case on each machine, in order of the cases' first appearance."""
    latest: dict[tuple[str, str], Record] = {}
    for record in records:
        latest[record.result.case, _machine_text(record.machine)] = record
    return list(latest.values())


def _machine_text(machine: Mapping[str, Any]) -> str:
    """Return a description of the machine, without the figures that change between runs."""
    gpus: list[str] = machine.get("gpus") or []
    # Virtual machines do not report the model, and processors with and without fast bf16 have the same name.
    bf16, fp32 = machine.get("matmul_bf16_gflops"), machine.get("matmul_fp32_gflops")
    products = f"{'fast' if bf16 > 2 * fp32 else 'slow'} bf16, " if bf16 and fp32 else ""
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    parts = [
        f"{machine.get('cpu')}, {products}{machine.get('cores')} cores, {machine.get('memory_gib')} GiB",
        counted or "no GPU",
        f"torch {machine.get('torch')}",
    ]
    return "; ".join(parts) + "."


def _figures_table(records: Sequence[Record]) -> str:
    counts = Counter(name for record in records for name in _plain(record))
    shared = {name for name, count in counts.items() if 2 * count >= len(records)}
    rows = [_row(record, shared) for record in records]
    columns = list(dict.fromkeys(name for row in rows for name, cell in row.items() if cell))
    return markdown_table(columns, [[row.get(name, "") for name in columns] for row in rows])


def _plain(record: Record) -> dict[str, str]:
    """Return the numbers and texts of a record's detail, formatted, by column name."""
    detail = record.result.detail
    plain = {name: value for name, value in detail.items() if isinstance(value, int | float | str)}
    return {"against" if name == "peer" else _words(name): _text(value) for name, value in plain.items()}


def _row(record: Record, shared: Collection[str]) -> dict[str, str]:
    """Return the cells of one record by column: figures, common details, machine, date, commit, other details."""
    result, plain = record.result, _plain(record)
    return {
        "case": result.case,
        "ours": _text(result.ours),
        "peer": _text(result.peer),
        "ratio": _text(result.ratio),
        "unit": f"{result.unit}, less is better" if result.lower_is_better else result.unit,
        **{name: value for name, value in plain.items() if name in shared},
        "matmul bf16 GFLOP/s": _text(record.machine.get("matmul_bf16_gflops")),
        "CPU s per s": _text(record.machine.get("cpu_seconds_per_second")),
        "date": record.date,
        "commit": record.commit,
        "other": ", ".join(f"{name}: {value}" for name, value in plain.items() if name not in shared),
    }


def _detail_tables(records: Sequence[Record]) -> str:
    """Return one table for each detail that is a mapping of figures, such as the seconds of each phase."""
    named: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        for name, value in record.result.detail.items():
            if isinstance(value, Mapping) and not any(isinstance(cell, list | Mapping) for cell in value.values()):
                named.setdefault(name, {})[record.result.case] = value
    parts = []
    for name, tables in named.items():
        columns = list(dict.fromkeys(column for table in tables.values() for column in table))
        rows = [[case, *(_text(table.get(column)) for column in columns)] for case, table in tables.items()]
        parts.append(f"\n{_words(name).capitalize()}:\n\n{markdown_table(['case', *map(_words, columns)], rows)}")
    return "".join(parts)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown: the first column aligned left, the others right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n" for cells in lines)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    main()
