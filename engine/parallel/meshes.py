"""Device meshes and groups: the ranks that share a module, a row of tokens, or the stages of a pipeline."""

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine import internals
from engine.parallel import dist


def zero_mesh(*, stage: int, shard_ranks: int | None = None) -> DeviceMesh:
    """Return the mesh (pipeline, replicate, shard, tensor) of a ZeRO stage. `pipeline` and `tensor` are left out if 1.

    From stage 1 on, `shard_ranks` ranks (default: all) share a copy of the model. Each shape has one mesh: torch
    combines only tensors of one mesh. Raises ValueError if `shard_ranks` does not divide the ranks.
    """
    world, size = dist.world(), dist.world().zero_size
    shard = 1 if stage == 0 else shard_ranks or size
    if size % shard:
        raise ValueError(f"shard_ranks={shard} does not divide the {size} ranks. Use a divisor of {size}")
    sizes = {"pipeline": world.pipeline, "replicate": size // shard, "shard": shard, "tensor": world.tensor}
    dims = {name: size for name, size in sizes.items() if size > 1 or name in ("replicate", "shard")}
    return dist.cached(
        ("mesh", *sizes.values()),
        lambda: _with_timeout(init_device_mesh(world.device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))),
    )


def tensor_mesh(ranks: int) -> DeviceMesh:
    """Return the mesh (tensor,) of this rank's group of `ranks` consecutive ranks, which need not be `World.tensor`.

    Raises ValueError if `ranks` does not divide the number of ranks.
    """
    world = dist.world()
    if world.size % ranks:
        raise ValueError(f"tensor_parallel={ranks} does not divide the {world.size} ranks. Use a divisor")
    shape = (world.size // ranks, ranks)
    return dist.cached(
        ("tensor", ranks),
        lambda: _with_timeout(init_device_mesh(world.device.type, shape, mesh_dim_names=("group", "tensor"))),
    )["tensor"]


def sequence_group() -> ProcessGroup:
    """Return the ranks that share the tokens of this rank's rows. The first call is collective.

    It is a group of its own: if it has all ranks, the group of a mesh would be the one that FSDP2 uses.
    """
    world, size = dist.world(), dist.world().sequence
    members = [[*range(first, first + size)] for first in range(0, world.size, size)]
    return dist.cached(("sequence", size), lambda: dist.subgroup(members))


def first_and_last_stage_group() -> ProcessGroup | None:
    """Return the ranks of the first and the last stage of this rank's model; None on other ranks. Every rank calls.

    Each other rank gets a group of its own, because all ranks must have equally many groups. torch names a group that a
    mesh makes by this number, and destroys groups in the order of their names (pytorch/pytorch#190396).
    """
    world = dist.world()
    stage_size = world.size // world.pipeline
    last = world.size - stage_size
    members = [*([rank, last + rank] for rank in range(stage_size)), *([rank] for rank in range(stage_size, last))]
    own = dist.cached(("ends", world.pipeline), lambda: dist.subgroup(members))
    return own if world.pipeline_rank in (0, world.pipeline - 1) else None


def _with_timeout(mesh: DeviceMesh) -> DeviceMesh:
    """Set the timeout of the groups of a mesh, which torch makes with NCCL's default of ten minutes."""
    for dim in range(mesh.ndim):
        internals.set_timeout(mesh.get_group(dim), dist.TIMEOUT)
    return mesh
