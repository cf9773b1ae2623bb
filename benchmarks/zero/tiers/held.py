"""Bytes of model states on this process's ranks, by stage and tier, beside what engine/memory predicts.

Prints one JSON object: by layout what is held between steps and after a backward, on device and host together (the
same memory here), and in files.
"""

import gc
import json
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.zero.tiers.curves import layouts
from engine import Engine, EngineConfig, OptimizerConfig
from engine.memory import model_states
from engine.offload import OffloadedOptimizer
from engine.offload.scratch_file import ScratchFile
from engine.parallel import dist, zero

WIDTH, SUB_GROUP = 256, 16 * 1024


class Net(nn.Module):
    """Blocks of matrices between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(8))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)[:, :WIDTH]
        return self.head(x)


def living(skip: frozenset[int]) -> int:
    """Bytes of all tensors' storages, each once, those at the addresses `skip` left out."""
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if isinstance(found, Tensor):
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None:
                    storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
                    if storage.data_ptr() not in skip:
                        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def settled(skip: frozenset[int] = frozenset()) -> int:
    """`living` once nothing changes any more: Gloo's threads let go of the last buffers a little later."""
    dist.barrier()
    last, now = -1, living(skip)
    while last != now:
        time.sleep(0.1)
        last, now = now, living(skip)
    return now


def held(layout: dict[str, Any]) -> dict[str, float]:
    before = settled()
    config = EngineConfig(dtype="bf16", **(layout | {"sub_group_size": SUB_GROUP}))
    engine = Engine(Net(), config, optimizer=OptimizerConfig(lr=1e-3))
    mapped = engine._nvme_parameters
    files = [found for found in gc.get_objects() if isinstance(found, ScratchFile)]
    skip = frozenset(file.bytes.untyped_storage().data_ptr() for file in files)
    for _ in range(2):
        for last in (False, True):
            engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().sum(), last=last)
        after = settled(skip) - before
        engine.step()
    resting = settled(skip) - before
    in_files = engine.optimizer.bytes["nvme"] if isinstance(engine.optimizer, OffloadedOptimizer) else 0
    in_files += mapped.bytes if mapped is not None else 0
    return {"resting": resting, "after_backward": after, "files": in_files, **predicted(engine, layout)}


def predicted(engine: Engine, layout: dict[str, Any]) -> dict[str, float]:
    total = sum(p.numel() for p in engine.module.parameters())
    block = sum(p.numel() for p in zero.units(engine.module)[0].parameters())
    states = model_states(
        total,
        root=total - 8 * block,
        block=block,
        config=engine.config,
        ranks=dist.world().size,
    )
    shards = 1 if layout["zero_stage"] == 0 else dist.world().size
    gradients = 4 * total // shards if layout["offload_optimizer"] == "none" else states.host_gradients
    resting = states.resting + states.host - states.host_gradients
    return {
        "predicted_resting": resting,
        "predicted_after_backward": resting + gradients,
        "predicted_files": states.nvme,
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.start("held", device="cpu")
    chosen = dict(layouts())
    held(chosen["zero1 none"])  # what ranks of one host share to talk through is made once, and is no model state
    print(json.dumps({name: held(layout) for name, layout in chosen.items()}), flush=True)
    dist.stop()


if __name__ == "__main__":
    main()
