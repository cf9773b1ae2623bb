"""Triton's interpreter runs the kernels where there is no GPU; where there is one, the tests run them compiled.

Triton decides when a function is declared, its own included, so Triton and the kernels are imported under the switch
here, anew if something of the test session imported Triton before; then the switch is put back.
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
        if not name.startswith("triton._C"):  # compiled, and loads only once
            del sys.modules[name]
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        importlib.import_module("tests.engine.kernels_triton.interpreter").mend()
        for name in WITH_TRITON:
            importlib.import_module(f"engine.kernels_triton.{name}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU the kernels' tests are tests of the GPU."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.parent == HERE and item.path.name != "test_compile.py":
                item.add_marker(pytest.mark.gpu)


if find_spec("triton") is None:
    collect_ignore = [path.name for path in HERE.glob("test_*.py")]
elif not torch.cuda.is_available():
    import_for_the_interpreter()
