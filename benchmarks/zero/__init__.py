"""The ZeRO engine: equal curves, bytes a rank, offload tiers, start, checkpoints, and DeepSpeed on the same work.

A case is a module of this folder with a function `measure(rounds) -> Result`. Those of `LONG` run by name only.
"""

import importlib
from collections.abc import Sequence

from benchmarks.record import Result

MODULES: dict[str, str] = {
    "deepspeed2": "beside_deepspeed.stage2",
    "deepspeed3": "beside_deepspeed.stage3",
    "wire": "wire.case",
    "sequence": "sequence.case",
    "parity": "tiers.parity",
    "parity16": "tiers.parity16",
    "bytes": "tiers.held_bytes",
    "host_adamw": "tiers.host_adamw",
    "nvme_step": "tiers.nvme_step",
    "plan": "plan.case",
    "start": "start",
    "checkpoint": "checkpoint",
    "opt_1b": "tiers.opt_1b",
    "opt_3b": "tiers.opt_3b",
    "load_10gb": "tiers.load_10gb",
}
LONG: tuple[str, ...] = ("opt_1b", "opt_3b", "load_10gb")
CASES = tuple(MODULES)


def run(cases: Sequence[str], rounds: int) -> list[Result]:
    """Measure `cases`, one after the other; the long ones only where fewer than all are asked for."""
    wanted = [case for case in cases if case not in LONG or set(cases) != set(CASES)]
    return [importlib.import_module(f"benchmarks.zero.{MODULES[case]}").measure(rounds) for case in wanted]
