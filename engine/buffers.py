"""The buffers of a module that are part of its state."""

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a state dict has, by name: running statistics, a router's correction, a layer's scale; not what is
    computed at construction.
    """
    return {
        f"{path}.{leaf}" if path else leaf: buffer
        for path, owner in module.named_modules()
        for leaf, buffer in owner._buffers.items()
        if buffer is not None and leaf not in owner._non_persistent_buffers_set
    }
