"""Triton's interpreter runs the kernels where there is no GPU; where there is one, the tests run them compiled.

Triton decides when a kernel is declared, so everything is imported under the switch here, and the switch is put back:
nothing else in the test session is to see it.
"""

import importlib
import os
from importlib.util import find_spec

import torch

WITH_TRITON = ("token_logprobs", "decode_attention", "sample", "gae")

if find_spec("triton") is None:
    collect_ignore = [f"test_{name}_triton.py" for name in WITH_TRITON] + ["test_table.py"]
else:
    before = os.environ.get("TRITON_INTERPRET")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        importlib.import_module("tests.engine.kernels.interpreter").multiply_bf16_as_numbers()
    for name in WITH_TRITON:
        importlib.import_module(f"engine.kernels.{name}_triton")
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)
