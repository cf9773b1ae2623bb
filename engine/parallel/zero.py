"""ZeRO stages 0 to 3 as four settings of FSDP2 (`torch.distributed.fsdp.fully_shard`).

Stage 0 replicates on a mesh (W, 1); stages 1 to 3 shard on a mesh (1, W) and differ in how long gathered parameters and
whole gradients live. FSDP2 always keeps optimizer states with the shard.
"""

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from engine.parallel import dist


def units(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a module: the elements of its outermost ModuleLists, each one FSDP unit."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found.extend(block for block in child if any(True for _ in block.parameters()))
        else:
            found.extend(units(child))
    return found


def shard(
    module: nn.Module, *, stage: int, policy: MixedPrecisionPolicy, offload: bool, ranks: int | None = None
) -> None:
    """Lay a module out over the ranks, in place. Its parameters become DTensors.

    `ranks` neighbours share one copy (stages 1 to 3), all ranks by default. Raises ValueError where the world does not
    divide by it.
    """
    size = dist.world().size
    together = 1 if stage == 0 else ranks or size
    if size % together:
        raise ValueError(f"shard_ranks={together} does not divide the {size} ranks")
    mesh = dist.mesh(replicate=size // together, shard=together)
    where = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in units(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy, offload_policy=where)
    fully_shard(module, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy, offload_policy=where)


def before_micro_batch(module: nn.Module, *, stage: int, last: bool) -> None:
    """Set what the coming backward does: keep or reduce gradients, keep or release parameters."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(last or stage >= 2)
    module.set_reshard_after_backward(last or stage == 3)


def release(module: nn.Module) -> None:
    """Drop gathered parameters, so that the next use gathers what the optimizer wrote meanwhile."""
    for unit in _fsdp_modules(module):
        unit.reshard()


def _fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    for child in module.modules():
        if isinstance(child, FSDPModule):
            yield child
