"""DeepSpeed's two estimators of model states, formula for formula, so that figures can be compared.

`estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` (deepspeed/runtime/zero/
stage_1_and_2.py and stage3.py). Both count 18 bytes a parameter: 2 + 4 + 8 of mixed-precision Adam and 4 of fp32
gradient. Left out there: activations, buffers, fragmentation. There is none for stage 1.
"""

from dataclasses import dataclass

FACTOR = 1.5  # what DeepSpeed adds on the host for buffers


@dataclass(frozen=True)
class Estimate:
    """Bytes a device and bytes a host, for one choice of offloading."""

    name: str
    device: int
    host: int


def zero2(parameters: int, *, gpus: int, nodes: int = 1, offload: bool) -> Estimate:
    """Stage 2. `gpus` are those of one node."""
    total = gpus * nodes
    if offload:
        return Estimate("zero2, optimizer on the host", 2 * parameters, int(parameters * max(4 * total, 16) * FACTOR))
    return Estimate("zero2", 2 * parameters + int(18 * parameters / total), int(parameters * 4 * gpus * FACTOR))


def zero3(parameters: int, largest: int, *, gpus: int, nodes: int = 1, optimizer: bool, weights: bool) -> Estimate:
    """Stage 3 with modules built sharded (zero.Init). `largest` is the largest module's own parameters.

    `optimizer` and `weights` say what is offloaded; DeepSpeed never offloads weights alone.
    """
    total, layer = gpus * nodes, 4 * largest
    if optimizer and weights:
        return Estimate("zero3, all on the host", layer, int(parameters * 18 / nodes * FACTOR))
    if optimizer:
        host = int(parameters * 16 / nodes * FACTOR)
        return Estimate("zero3, optimizer on the host", layer + int(2 * parameters / total), host)
    return Estimate("zero3", layer + int(18 * parameters / total), int(largest * 4 * gpus * FACTOR))


def all_estimates(parameters: int, largest: int, *, gpus: int, nodes: int = 1) -> list[Estimate]:
    """Every choice that DeepSpeed's tables print."""
    return [
        *(zero2(parameters, gpus=gpus, nodes=nodes, offload=offload) for offload in (False, True)),
        *(
            zero3(parameters, largest, gpus=gpus, nodes=nodes, optimizer=optimizer, weights=weights)
            for optimizer, weights in ((False, False), (True, False), (True, True))
        ),
    ]
