"""The GPU measurements run on a CPU at tiny sizes, without the packages that a bare GPU machine lacks.

The other benchmarks and tests of such a machine are imported.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
LACKING = ("hydra", "omegaconf", "wandb", "datasets", "pydantic")  # those of tests/conftest.py and what they need
OTHERS = (
    "benchmarks.__main__",
    "benchmarks.dschat",
    "tests.benchmarks.test_dschat",
    "tests.pipeline.models.test_on_gpu",
)
ON_A_BARE_MACHINE = f"""
import importlib, sys
sys.modules |= dict.fromkeys({LACKING!r})  # the value None makes an import fail
import pytest
collected = pytest.main(["-q", "-m", "gpu", "--collect-only", "tests"])  # the error of one file would stop all tests
from benchmarks.gpu.__main__ import main
import engine, engine.memory, engine.deepspeed_json
for name in {OTHERS!r}:
    importlib.import_module(name)
sys.exit(main(["--device", "cpu", "--tiny"]) or collected)
"""


def test_a_bare_machine_collects_the_gpu_tests_and_runs_every_part() -> None:
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # Hydra's plugin imports Hydra
    command = [sys.executable, "-c", ON_A_BARE_MACHINE]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr
    assert "tests/pipeline/models/test_on_gpu.py::" in finished.stdout
    rows = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    assert not [row for row in rows if "failed" in row], finished.stdout
    cases = {row["part"]: set() for row in rows[1:]}
    for row in rows[1:]:
        cases[row["part"]].add(row.get("case"))
    assert set(cases) == {"ceilings", "decode", "kernels", "training", "profile", "largest"}
    assert {"ours", "generate"} <= cases["decode"] and {"zero1", "zero3"} <= cases["training"]
    assert all(row["trains"] for row in rows if row.get("part") == "largest" and "case" in row)


def test_a_failed_part_is_reported_and_the_others_run(monkeypatch, capsys) -> None:
    from benchmarks.gpu import __main__ as bench

    def fails(setting):
        yield {"case": "first"}
        raise ValueError("no such card")

    monkeypatch.setattr(bench, "PARTS", {"broken": fails, "ceilings": bench.PARTS["ceilings"]})
    monkeypatch.setattr(bench.dist, "stop", lambda: None)
    assert bench.main(["--device", "cpu", "--tiny"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["failed"] for row in rows if "failed" in row] == ["ValueError: no such card"]
    assert "in fails" in next(row["traceback"] for row in rows if "failed" in row)
    assert any(row.get("case") == "matmul" for row in rows)


def test_a_profile_counts_each_kernel_once(monkeypatch) -> None:
    """PyTorch's profiler adds the time of a kernel to its operator, and to the ranges around it."""
    import torch
    from torch.autograd import DeviceType
    from torch.autograd.profiler_util import EventList, FunctionEvent, Kernel

    from benchmarks.gpu import profiles

    class OnGpu(profiles.Setting):
        def wait(self) -> None:
            pass

    common = {"thread": 0, "start_us": 0, "end_us": 5000, "use_device": "cuda", "stack": []}
    operator = FunctionEvent(id=1, name="aten::mm", **common)
    operator.kernels.append(Kernel("gemm", 0, 5000))
    kernel = FunctionEvent(id=2, name="gemm", device_type=DeviceType.CUDA, **common)
    step = FunctionEvent(id=3, name="step", device_type=DeviceType.CUDA, is_user_annotation=True, **common)
    events = EventList([operator, kernel, step], use_device="cuda")
    events._build_tree()
    recorded = SimpleNamespace(key_averages=events.key_averages)
    monkeypatch.setattr(profiles, "profile", lambda activities: nullcontext(recorded))
    found = profiles._by_kernel(OnGpu(torch.device("cuda")), lambda: None)
    assert found == {"device_ms": 5.0, "kernels": [{"name": "gemm", "ms": 5.0, "calls": 1}]}
