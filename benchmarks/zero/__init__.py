"""The ZeRO engine: equal curves, bytes a rank, offload tiers, start, checkpoints, and DeepSpeed on the same work.

A case is a module of this folder with a function `measure(rounds, ...) -> Result`, and what else it is told. Those of
`LONG` run by name only.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.record import Result

MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepspeed2": ("beside_deepspeed.compare", {"stage": 2}),
    "deepspeed3": ("beside_deepspeed.compare", {"stage": 3}),
    "wire": ("wire.case", {}),
    "sequence": ("sequence.case", {}),
    "parity": ("tiers.parity", {}),
    "parity16": ("tiers.parity16", {}),
    "bytes": ("tiers.held_bytes", {}),
    "host_adamw": ("tiers.host_adamw", {}),
    "nvme_step": ("tiers.nvme_step", {}),
    "plan": ("plan.case", {}),
    "start": ("start", {}),
    "checkpoint": ("checkpoint", {}),
    "opt_1b": ("tiers.large", {"case": "opt_1b", "model": "opt-1.3b", "at_most_gib": 10.0}),
    "opt_3b": ("tiers.large", {"case": "opt_3b", "model": "opt-2.7b", "at_most_gib": 24.0}),
    "load_10gb": ("tiers.load_10gb", {}),
}
LONG: tuple[str, ...] = ("opt_1b", "opt_3b", "load_10gb")
CASES = tuple(MODULES)


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Measure `cases`, one after the other. If `cases` are all cases, the long ones are left out."""
    for case in cases:
        if case not in LONG or set(cases) != set(CASES):
            yield _measure(*MODULES[case], rounds)


def _measure(module: str, told: dict[str, Any], rounds: int) -> Result:
    result: Result = importlib.import_module(f"benchmarks.zero.{module}").measure(rounds, **told)
    return result
