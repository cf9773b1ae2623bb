"""Run the kernels in Triton's interpreter on machines without a GPU, and compiled on machines with one.

Triton chooses the interpreter when a function is declared. So Triton and the kernels are imported (again, if necessary)
while TRITON_INTERPRET is set. Then the variable gets its old value.
"""

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
WITH_TRITON = ("token_logprobs", "decode_attention", "sample")


def import_for_the_interpreter() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        if not name.startswith("triton._C"):  # a compiled module, which loads only once
            del sys.modules[name]
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        importlib.import_module("tests.engine.kernels_triton.interpreter").patch_interpreter()
        for name in WITH_TRITON:
            kernel = importlib.import_module(f"engine.kernels_triton.{name}")
            vars(kernel)["shared_memory_and_multiprocessors"] = lambda device: (227 * 1024, 4)  # as on an H200
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the kernels as GPU tests on machines with a GPU."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.parent == HERE and item.path.name != "test_compile.py":
                item.add_marker(pytest.mark.gpu)


if find_spec("triton") is None:
    collect_ignore = [path.name for path in HERE.glob("test_*.py")]
elif not torch.cuda.is_available():
    import_for_the_interpreter()
