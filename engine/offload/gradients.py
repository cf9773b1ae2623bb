"""Gradients of offloaded parameters, moved out of the module during backward as soon as FSDP2 has reduced them.

A hook on each sharded parameter moves the reduced gradient and clears `parameter.grad`, so at most one FSDP unit's
gradients are on the device. The gradient of a single micro-batch stays in the parameter's precision, to which FSDP2 has
rounded it. Sums over several micro-batches are fp32. A sum in host memory is computed on the GPU, as in ZeRO-Offload:
upload the sum, add, download.
"""

import torch
from torch import Tensor, nn

from engine.offload.states import Segment
from engine.parallel import dist, dtensors


class Gradients:
    """Flat gradients of shards, stored on `device` until the optimizer step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[int, Tensor] = {}
        self._pinned: dict[tuple[int, torch.dtype], Tensor] = {}  # host memory for gradients from a GPU

    def add(self, shard: int, gradient: Tensor) -> None:
        """Add the gradient of one micro-batch, flat."""
        previous = self._sums.get(shard)
        if previous is not None:
            # Upload before the cast: a cast on the CPU would not wait for the download of `previous`.
            gradient = previous.to(gradient.device, non_blocking=True).float().add_(gradient)
        if gradient.device.type != self._device.type:
            gradient = self._download(shard, gradient)
        self._sums[shard] = gradient

    def wait(self) -> None:
        """Wait until the copies from the GPU are complete."""
        if self._pinned:
            torch.cuda.current_stream().synchronize()  # FSDP2 made this stream wait for the stream of the copies

    def of(self, segment: Segment) -> Tensor | None:
        """Return the gradient of a segment of a shard; None if the shard has no gradient."""
        found = self._sums.get(segment.shard)
        return None if found is None else found[segment.start : segment.stop]

    def has(self, shard: int) -> bool:
        """Return whether a gradient of this shard was added in this step."""
        return shard in self._sums

    def remove(self, shard: int) -> None:
        """Drop the gradient of this shard."""
        self._sums.pop(shard, None)

    def clear(self) -> None:
        """Drop all gradients."""
        self.wait()
        self._sums.clear()

    def sums_of_squares(self) -> dict[int, float]:
        """Return the sum of squares of each gradient by shard, with one transfer from the device."""
        self.wait()
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in self._sums.values()]
        squares = torch.stack(norms).double().square().tolist() if norms else []
        return dict(zip(self._sums, squares, strict=True))

    @property
    def bytes(self) -> int:
        """Return the memory of gradients and pinned buffers."""
        held = [*self._sums.values(), *self._pinned.values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())

    def _download(self, shard: int, gradient: Tensor) -> Tensor:
        key = (shard, gradient.dtype)
        if key not in self._pinned:
            self._pinned[key] = torch.empty(gradient.numel(), dtype=gradient.dtype, pin_memory=True)
        gradient.record_stream(torch.cuda.current_stream())
        return self._pinned[key].copy_(gradient, non_blocking=True)


def collect_gradients(parameter: nn.Parameter, shard: int, gradients: Gradients) -> None:
    """Register a hook that moves each reduced gradient of `parameter` to `gradients`."""

    def hook(reduced: Tensor) -> None:
        gradient = reduced.grad
        assert gradient is not None
        local = dtensors.local(gradient).detach().reshape(-1)
        if local.device.type == "cpu" and dist.world().device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # FSDP2 may still be copying it off the device
        reduced.grad = None
        gradients.add(shard, local)

    parameter.register_post_accumulate_grad_hook(hook)
