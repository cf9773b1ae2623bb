"""Bytes per rank of model states against the prediction of engine/memory, every stage and tier on 1, 2 and 4 ranks.

Each layout has three figures: bytes between steps, bytes after a backward, and bytes in files. On a CPU, device and
host are the same memory, so the first two figures count both.
"""

import gc
import json
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from benchmarks.zero.parity import RANKS, layouts
from engine import Engine, EngineConfig, OptimizerConfig
from engine.memory import ModelShape, Workload, trained_states
from engine.offload import OffloadedOptimizer
from engine.offload.scratch_file import ScratchFile
from engine.parallel import dist, zero

FIGURES = ("resting", "after_backward", "files")
WIDTH, BLOCKS, SUB_GROUP = 256, 8, 16 * 1024


def measure(rounds: int) -> Result:
    """Return the largest relative error of a prediction, in per cent. Runs once: the bytes do not vary."""
    errors: dict[str, float] = {}
    for ranks in RANKS:
        by_layout, *_ = run_ranks(__name__, [], ranks)
        for layout, figures in by_layout.items():
            for figure in FIGURES:
                predicted = figures[f"predicted_{figure}"]
                if predicted:
                    errors[f"{layout} x{ranks} {figure}"] = abs(figures[figure] / predicted - 1)
    worst = max(errors, key=lambda name: errors[name])
    return Result(
        bench="zero",
        case="bytes",
        ours=100 * errors[worst],
        unit="% off at most",
        lower_is_better=True,
        detail={"at_most": 5.0, "worst": worst, "figures": len(errors)},
    )


def main() -> None:
    """Measure every layout on one rank; print the bytes by layout as JSON."""
    torch.set_num_threads(1)
    dist.start("state_bytes", device="cpu")
    by_name = dict(layouts())
    _state_bytes(by_name["zero1 none"])  # the first communication allocates buffers, which are no model states
    print(json.dumps({name: _state_bytes(layout) for name, layout in by_name.items()}), flush=True)
    dist.stop()


class Net(nn.Module):
    """Blocks of one matrix each between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)[:, :WIDTH]
        return self.head(x)


def _state_bytes(layout: dict[str, Any]) -> dict[str, float]:
    """Return the measured and the predicted bytes of one layout."""
    before = _settled_tensor_bytes()
    config = EngineConfig(dtype="bf16", **(layout | {"sub_group_size": SUB_GROUP}))
    engine = Engine(Net(), config, optimizer=OptimizerConfig(lr=1e-3))
    nvme_parameters = engine._nvme_parameters
    files = [item for item in gc.get_objects() if isinstance(item, ScratchFile)]
    mapped = frozenset(file.bytes.untyped_storage().data_ptr() for file in files)
    for _ in range(2):
        for last in (False, True):
            engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().sum(), last=last)
        after_backward = _settled_tensor_bytes(mapped) - before
        engine.step()
    resting = _settled_tensor_bytes(mapped) - before
    in_files = engine.optimizer.bytes["nvme"] if isinstance(engine.optimizer, OffloadedOptimizer) else 0
    in_files += nvme_parameters.bytes if nvme_parameters is not None else 0
    return {"resting": resting, "after_backward": after_backward, "files": in_files, **_predicted(engine, layout)}


def _predicted(engine: Engine, layout: dict[str, Any]) -> dict[str, float]:
    total = sum(p.numel() for p in engine.module.parameters())
    block = sum(p.numel() for p in zero.units(engine.module)[0].parameters())
    ranks = dist.world().size
    shape = ModelShape(total, root=total - BLOCKS * block, block=block)
    states = trained_states(shape, Workload(engine.config, ranks, is_cpu=True))
    shards = 1 if layout["zero_stage"] == 0 else ranks
    gradients = 4 * total // shards if layout["offload_optimizer"] == "none" else states.host_gradients
    resting = states.resting + states.host - states.host_gradients
    return {
        "predicted_resting": resting,
        "predicted_after_backward": resting + gradients,
        "predicted_files": states.nvme,
    }


def _settled_tensor_bytes(skip: frozenset[int] = frozenset()) -> int:
    """Return `_tensor_bytes` when it no longer changes. Gloo's threads release their last buffers with a delay."""
    dist.barrier()
    previous, current = -1, _tensor_bytes(skip)
    while previous != current:
        time.sleep(0.1)
        previous, current = current, _tensor_bytes(skip)
    return current


def _tensor_bytes(skip: frozenset[int]) -> int:
    """Return the bytes of all tensor storages, each counted once, except those at the addresses in `skip`."""
    gc.collect()
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        if isinstance(item, Tensor):
            for tensor in (item, item.grad if item.is_leaf else None):
                if tensor is not None:
                    storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
                    if storage.data_ptr() not in skip:
                        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


if __name__ == "__main__":
    main()
