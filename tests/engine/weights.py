"""The weights of an engine as full tensors, for comparisons with other layouts and with plain PyTorch."""

from torch import Tensor

from engine import Engine
from engine.parallel import dtensors


def full_weights(engine: Engine) -> dict[str, Tensor]:
    """Return copies of the module's parameters on the host. Collective."""
    return {name: dtensors.full_tensor(p.detach()).cpu().clone() for name, p in engine.module.named_parameters()}
