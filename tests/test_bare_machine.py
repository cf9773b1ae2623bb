"""A GPU machine with PyTorch, transformers and Triton alone: what is to run there does not ask for more."""

import subprocess
import sys

from tests.tiny import ROOT

WITHOUT = ("pydantic", "hydra", "omegaconf", "datasets", "wandb")  # as tests/conftest.py, and what these bring
WANTED = (
    "benchmarks.__main__",
    "benchmarks.dschat",
    "benchmarks.gpu.__main__",
    "engine",
    "tests.benchmarks.test_dschat",
    "tests.pipeline.models.test_on_gpu",
)
TRIAL = """
import importlib, sys
for name in {without}:
    sys.modules[name] = None
for name in {wanted}:
    importlib.import_module(name)
"""


def test_benches_and_tests_of_gpus_are_there_without_what_the_stages_need() -> None:
    command = [sys.executable, "-c", TRIAL.format(without=WITHOUT, wanted=WANTED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
