import sys
from pathlib import Path

import pytest
import torch

from benchmarks import machine
from benchmarks.machine import describe
from benchmarks.measure import BenchFailed, in_turn, median, medians_by_name, run_command, spread


def test_cases_alternate() -> None:
    order: list[str] = []

    def case(name: str) -> str:
        order.append(name)
        return f"{name}{len(order)}"

    assert in_turn({"a": lambda: case("a"), "b": lambda: case("b")}, 2) == {"a": ["a1", "a3"], "b": ["b2", "b4"]}
    with pytest.raises(ValueError, match="at least 1"):
        in_turn({}, 0)


def test_medians() -> None:
    assert median([5.0, 1.0, 2.0]) == 2.0
    assert spread([8.0, 10.0, 12.0]) == 0.4
    assert spread([0.0]) == 0.0
    assert medians_by_name([{"x": 1.0}, {"x": 3.0, "y": 7.0}, {"x": 2.0}]) == {"x": 2.0, "y": 7.0}


def test_a_command_is_timed_and_its_output_returned(tmp_path: Path) -> None:
    busy = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass\nprint('done')"
    finished = run_command([sys.executable, "-c", busy], folder=tmp_path, limit=60)
    assert finished.output == "done\n"
    assert finished.seconds >= 0.2
    assert 0.2 / finished.seconds <= finished.cpu_seconds_per_second < 1.5


def test_the_error_of_a_failed_or_late_command_has_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="status 3:\nno luck"):
        run_command([sys.executable, "-c", "print('no luck'); raise SystemExit(3)"], folder=tmp_path, limit=60)
    with pytest.raises(BenchFailed, match=r"did not end within 0\.3 seconds"):
        run_command([sys.executable, "-c", "import time; time.sleep(30)"], folder=tmp_path, limit=0.3)


def test_the_machine_is_described_without_a_name() -> None:
    machine = describe()
    assert machine["cores"] >= 1
    assert machine["torch"] == torch.__version__
    assert set(machine) == {"cpu", "cores", "memory_gib", "gpus", "system", "python", "torch"}


@pytest.mark.parametrize(
    ("fp32", "bf16", "expected"), [(136.0, 0.3, "fp32"), (136.0, 68.0, "bf16"), (90.0, 2700.0, "bf16")]
)
def test_a_processor_without_bf16_products_is_measured_in_fp32(
    fp32: float, bf16: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {torch.float32: fp32, torch.bfloat16: bf16}
    monkeypatch.setattr(machine, "matrix_gflops", lambda dtype, *_: rates[dtype])
    assert machine.cpu_precision.__wrapped__() == expected
