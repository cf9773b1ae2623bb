"""The ZeRO engine: loss curves, memory, offload tiers, start-up, checkpoints, and a comparison with DeepSpeed.

Each case is a function `measure(rounds, ...) -> Result` of a module in this folder. `MODULES` lists the module and the
remaining arguments. Cases in `LONG` run only if the command line names them.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.record import Result

MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepspeed2": ("deepspeed", {"stage": 2}),
    "deepspeed3": ("deepspeed", {"stage": 3}),
    "wire": ("compression", {}),
    "sequence": ("sequence", {}),
    "parity": ("parity", {"case": "parity"}),
    "parity16": ("parity", {"case": "parity16"}),
    "bytes": ("state_bytes", {}),
    "host_adamw": ("optimizer_step", {"case": "host_adamw"}),
    "nvme_step": ("optimizer_step", {"case": "nvme_step"}),
    "plan": ("plan", {}),
    "start": ("start", {}),
    "checkpoint": ("checkpoint", {}),
    "opt_1b": ("large_models", {"case": "opt_1b", "model": "opt-1.3b", "at_most_gib": 10.0}),
    "opt_3b": ("large_models", {"case": "opt_3b", "model": "opt-2.7b", "at_most_gib": 24.0}),
    "load_10gb": ("load_checkpoint", {}),
}
LONG: tuple[str, ...] = ("opt_1b", "opt_3b", "load_10gb")
CASES = tuple(MODULES)


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Measure `cases` in order. If `cases` contains all cases, skip those in `LONG`."""
    for case in cases:
        if case not in LONG or set(cases) != set(CASES):
            module, arguments = MODULES[case]
            yield importlib.import_module(f"benchmarks.zero.{module}").measure(rounds, **arguments)
