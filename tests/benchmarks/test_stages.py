"""The stages benchmark with a stub of train.py."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import stages
from benchmarks.measure import BenchFailed

STUB = """
import json, sys
from pathlib import Path

words = dict(word.split("=", 1) for word in sys.argv[1:])
with open("LOG", "a") as log:
    log.write(json.dumps(words) + "\\n")
runs = sum(1 for _ in open("LOG"))
stages = ("sft", "reward", "ppo") if words["stage"] == "all" else (words["stage"],)
for stage in stages:
    folder = Path(words["run_dir"]) / stage
    folder.mkdir(parents=True)
    steps = int(words[stage + ".steps"])
    rows = [{"step": n, "tokens_per_second": 1.0 if n == 1 else 100.0 * runs} for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    memory = [{"rank": rank, "device_bytes": 0, "host_bytes": (rank + 1) * 2**30} for rank in range(2)]
    summary = {"tokens_per_second": 50.0, "peak_memory_by_rank": memory, "seconds_by_phase": {"train": runs}}
    (folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def train(tmp_path: Path) -> tuple[str, ...]:
    """A stub of train.py that logs its arguments and writes fixed figures."""
    script = tmp_path / "stub.py"
    script.write_text(STUB.replace("LOG", str(tmp_path / "log")))
    return sys.executable, str(script)


def words(tmp_path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def test_zero_stages_alternate_and_medians_are_returned(tmp_path: Path, train: tuple[str, ...]) -> None:
    results = stages.run(["sft-zero0", "sft-zero3"], 3, train)
    assert [one["engine"] for one in words(tmp_path)] == ["zero0", "zero3"] * 3
    assert {one["stage"] for one in words(tmp_path)} == {"sft"}
    zero0, zero3 = results
    assert (zero0.case, zero0.ours, zero0.detail["runs"]) == ("sft-zero0", 300.0, [100.0, 300.0, 500.0])
    assert (zero3.case, zero3.ours, zero3.unit, zero3.lower_is_better) == ("sft-zero3", 400.0, "tokens/s", False)
    assert zero0.detail["peak_host_gib_a_rank"] == 2.0
    assert zero0.detail["seconds_by_phase"] == {"train": 3}
    assert zero0.detail["spread"] == pytest.approx(400 / 300)
    assert not any(Path(one["run_dir"]).exists() for one in words(tmp_path))


def test_ppo_alone_runs_one_step_of_the_stages_before_it(tmp_path: Path, train: tuple[str, ...]) -> None:
    [result] = stages.run(["ppo-zero2"], 1, train)
    [one] = words(tmp_path)
    assert (one["stage"], one["sft.steps"], one["reward.steps"], one["ppo.steps"]) == ("all", "1", "1", "4")
    assert (one["model"], one["model.weights"], one["ranks"]) == ("opt-125m", "random", "2")
    assert one["rollout.max_new_tokens"] == "128"
    assert result.case == "ppo-zero2"


def test_a_stage_without_figures_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="sft wrote no usable figures"):
        stages.measure(0, ["sft"], (sys.executable, "-c", "pass"))


def test_the_rate_excludes_the_first_step() -> None:
    rows = [{"step": n, "tokens_per_second": rate} for n, rate in enumerate((5.0, 90.0, 100.0, 80.0), start=1)]
    assert stages.steady_rate(rows) == 90.0
    assert stages.steady_rate(rows[:1]) is None


def test_the_command_lists_benchmarks_and_refuses_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert "ppo-zero3" in capsys.readouterr().out
    assert command.main(["nothing"]) == 2
    assert "choose from: stages" in capsys.readouterr().err
    assert command.main(["stages", "sft-zero9"]) == 2
    assert "has no case sft-zero9" in capsys.readouterr().err
    assert command.main(["stages", "--rounds", "0"]) == 2
