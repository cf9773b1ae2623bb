"""The ZeRO engine: loss curves, memory, offload tiers, start-up, checkpoints, and a comparison with DeepSpeed.

    deepspeed2, deepspeed3    training steps at ZeRO stages 2 and 3, against DeepSpeed: 2 ranks, OPT-125M shape
    wire                      bytes of gathers and gradients without compression, divided by the bytes in 8 bits
    sequence                  a step on two rows of 4,096 tokens, against data parallelism
    parity, parity16          loss curves of each ZeRO stage and offload tier, against one process of plain PyTorch
    bytes                     bytes of model states per rank, against the prediction
    host_adamw, nvme_step     the offloaded optimizer's step in memory and with states in files
    plan                      phases whose planned seconds differ from the measured seconds by at most 30 %
    start                     seconds from the command line of a tiny run with 2 ranks to the end of its first step
    checkpoint                the delay of training by a save, as a share of the save's time
    opt_1b, opt_3b            memory of SFT of OPT-1.3B and OPT-2.7B with optimizer states on NVMe
    load_10gb                 memory of two ranks that write and load a checkpoint of more than 10 GB

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
