"""Import the engine, the GPU benchmarks and the GPU tests without the packages that only the stages need."""

import subprocess
import sys

from tests.tiny import ROOT

MISSING = ("pydantic", "hydra", "omegaconf", "datasets", "wandb")  # those of tests/conftest.py and their dependencies
MODULES = (
    "benchmarks.__main__",
    "benchmarks.dschat",
    "benchmarks.gpu.__main__",
    "engine",
    "tests.benchmarks.test_dschat",
    "tests.pipeline.models.test_on_gpu",
)
SCRIPT = """
import importlib, sys
for name in {missing}:
    sys.modules[name] = None
for name in {modules}:
    importlib.import_module(name)
"""


def test_gpu_benchmarks_and_gpu_tests_import_without_stage_packages() -> None:
    command = [sys.executable, "-c", SCRIPT.format(missing=MISSING, modules=MODULES)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
