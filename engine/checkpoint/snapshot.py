"""The values that tensors have at one moment, for a thread that writes them while training goes on.

Forward and backward change no parameter and no state of an optimizer, so tensors on the host are written from where
they are. Only what is not yet written when an optimizer steps has to be copied, and is, right before (copy on write).
Tensors on a device, and those that a forward may change, are copied at once (device_copies.py).
"""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.checkpoint.device_copies import Landing, moment
from engine.large_pages import ask_for_large_pages
from engine.offload.blocks import BLOCK_BYTES


class Snapshot:
    """Local tensors by name. One thread reads, another calls `complete` before it changes any of them."""

    def __init__(
        self, tensors: Mapping[str, Tensor], *, at_once: Collection[str] = (), on_device: bool = False
    ) -> None:
        """`at_once` are names of tensors that may change without notice; `on_device` leaves copies on their GPU."""
        self._changed = threading.Condition()
        self._reading: str | None = None
        self._copying: str | None = None
        self._copies: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        moved = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda" and not on_device}
        landings = {device: Landing(device, moment()) for device in moved}
        for name, tensor in tensors.items():
            if tensor.device.type == "cpu" and tensor.is_contiguous() and name not in at_once:
                self._live[name] = tensor
            elif tensor.device.type == "cuda" and on_device:
                self._copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            elif tensor.device in landings and tensor.is_contiguous():
                self._copies[name] = _landed(tensor, landings[tensor.device])
            else:
                self._copies[name] = _copy(tensor)
        self.made = moment()  # of a GPU: before this, what is in the copies may be something else

    @contextmanager
    def reading(self, name: str, tensor: Tensor) -> Iterator[Tensor]:
        """What to read in the place of `tensor`: it stays as it is within the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._copying != name)
            self._reading = name
            found = self._copies.get(name, tensor)
        try:
            yield found
        finally:
            with self._changed:
                self._reading = None
                self._changed.notify_all()

    def read(self, name: str) -> None:
        """Nobody needs this one any more."""
        with self._changed:
            self._live.pop(name, None)
            self._copies.pop(name, None)

    def keep_only(self, names: Collection[str]) -> None:
        """Nobody needs others (a rank does not write what another one does)."""
        for name in [*self._live, *self._copies]:
            if name not in names:
                self.read(name)

    def end(self) -> None:
        """Nobody needs anything any more."""
        self.keep_only(())

    def complete(self) -> None:
        """From now on the tensors may change. What is read first is copied last: it may be read by then."""
        for name in reversed(list(self._live)):
            copy: Tensor | None = None
            with self._changed:
                self._copying = name  # whoever reads it stops at the next border of a block
                self._changed.wait_for(lambda: self._reading != self._copying)
                tensor = self._live.get(name)
            try:
                copy = _copy(tensor) if tensor is not None else None
            finally:
                with self._changed:
                    self._copying = None
                    if copy is not None and self._live.pop(name, None) is not None:
                        self._copies[name] = copy
                    self._changed.notify_all()


def _landed(tensor: Tensor, landing: Landing) -> Tensor:
    room, at = _room_like(tensor), 0
    for part in landing.parts(tensor):
        room[at : at + len(part)] = part
        at += len(part)
    return room.view(tensor.dtype).view(tensor.shape)


def _copy(tensor: Tensor) -> Tensor:
    room = _room_like(tensor)
    return room.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _room_like(tensor: Tensor) -> Tensor:
    """Bytes on the host, as far from the border of a block as the original: its place in a file may depend on that."""
    room = torch.empty(tensor.nbytes + BLOCK_BYTES, dtype=torch.uint8)  # of malloc, which has used memory
    ask_for_large_pages([room])
    wanted = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.is_contiguous() else 0
    shift = (wanted - room.data_ptr()) % BLOCK_BYTES
    return room[shift : shift + tensor.nbytes]
