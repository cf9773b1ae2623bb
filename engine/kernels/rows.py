"""Kernels between the products of a decode step: norms of rows with the sums before them, turns of heads, gates.

Each is made ready for one shape, to be called often then: what a call gives lies in memory that the next one writes
again. `host/norms.py`, `host/rotary.py` and `host/gates.py` say what is computed, by PyTorch's operators and, on CPUs,
in C; `gpu/rows.py` does the same on GPUs.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

import torch

from engine.kernels.gpu.compiler import has_triton
from engine.kernels.host import gates, norms, rotary
from engine.kernels.host.library import library
from engine.kernels.ready import Ready

_HOST: dict[str, ModuleType] = {"norm_rows": norms, "turn_heads": rotary, "gate_rows": gates}


def maker(name: str, device: torch.device) -> Callable[..., Ready] | None:
    """`norm_rows`, `turn_heads` or `gate_rows` for tensors on a device; None where there is no such kernel."""
    if device.type == "cuda" and has_triton():
        return partial(getattr(import_module("engine.kernels.gpu.rows"), name), device=device)
    module = _HOST[name]
    if device.type != "cpu" or library(module.__name__.rpartition(".")[2]) is None:
        return None
    function: Callable[..., Ready] = getattr(module, name)
    return function
