import json
from dataclasses import replace
from pathlib import Path

from benchmarks.page import PAGE, newest, render
from benchmarks.record import RESULTS, Record, Result, append, commit, read

MACHINE = {"cpu": "Some CPU", "cores": 2, "memory_gib": 24, "gpus": [], "torch": "2.13.0", "matmul_bf16_gflops": 1250.0}
RESULT = Result(
    "stages", "sft-zero2", 500.0, "tokens/s", False, peer=400.0,
    detail={"ranks": 2, "runs": [1.0, 2.0], "seconds_by_phase": {"train": 3.25, "save": 1}},
)  # fmt: skip


def record(case: str, ours: float, **machine: object) -> Record:
    return Record("2026-11-21 10:00", "abc", {**MACHINE, **machine}, replace(RESULT, case=case, ours=ours))


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(read(RESULTS)), "run python -m benchmarks.page"


def test_an_object_has_the_keys_that_scripts_read() -> None:
    row = RESULT.to_object()
    assert list(row) == ["bench", "case", "ours", "peer", "ratio", "unit", "lower_is_better", "detail"]
    assert row["ratio"] == 1.25
    assert replace(RESULT, peer=None).to_object()["ratio"] is None
    assert replace(RESULT, ours=1234567.89).to_object()["ours"] == 1234600.0


def test_records_are_appended_to_the_file_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append([RESULT], MACHINE, path)
    append([replace(RESULT, case="ppo-zero0", peer=None)], MACHINE, path)
    first, second = read(path)
    assert first.result == RESULT
    assert first.machine == MACHINE
    assert first.commit == commit()
    assert second.result.case == "ppo-zero0"
    assert {"date", "commit", "machine", "ratio"} < set(json.loads(path.read_text().splitlines()[0]))
    assert read(tmp_path / "missing.jsonl") == []


def test_the_newest_record_of_a_case_and_machine_is_selected() -> None:
    records = [record("a", 1), record("b", 2), record("a", 3, torch="2.14.0"), record("a", 4, cores=8)]
    assert [(latest.result.case, latest.result.ours) for latest in newest(records)] == [("a", 3), ("a", 4), ("b", 2)]


def test_scores_of_the_demo_have_one_record_per_case() -> None:
    first, second = record("seed-1 ppo", 0.5), record("seed-1 ppo", 0.6, cores=8)
    records = [replace(each, result=replace(each.result, bench="demo_seeds")) for each in (first, second)]
    assert newest(records) == records[1:]


def test_recorded_results_contain_no_host_name() -> None:
    described = {"cpu", "cores", "memory_gib", "gpus", "system", "python", "torch"}
    measured = {"matmul_fp32_gflops", "matmul_bf16_gflops", "cpu_seconds_per_second", "threads"}
    assert all(set(record.machine) <= described | measured for record in read(RESULTS))
