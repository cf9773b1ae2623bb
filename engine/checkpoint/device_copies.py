"""Tensors of a GPU as they are at one moment, without training waiting for the bus.

A GPU copies its own memory a hundred times faster than anything leaves it: where it has room, copies stay there until
they are written. They leave through two pinned buffers, on a stream of their own, beside what training computes. A
plain copy to the host would go through the driver's small buffer, on the stream that training uses.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

PART_BYTES = 2**25
KEPT_FREE = 0.1  # share of a device's memory that copies leave: what training takes is seen only when it takes it


def room_for(tensors: Iterable[Tensor]) -> bool:
    """Whether the GPUs of these tensors have memory for a copy of each; True where none is on a GPU."""
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            needed[tensor.device] = needed.get(tensor.device, 0) + tensor.nbytes
    for device, size in needed.items():
        free, total = torch.cuda.mem_get_info(device)
        if size > free - KEPT_FREE * total:
            return False
    return True


def moment() -> "torch.cuda.Event | None":
    """When the GPU will have done what it was told so far; None where none is used."""
    return torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None


class Landing:
    """Reads tensors of one GPU into pinned memory, a part at a time, the next one beside the use of the last."""

    def __init__(self, device: torch.device, after: "torch.cuda.Event | None") -> None:
        """Nothing is read before `after`."""
        self._stream = torch.cuda.Stream(device)
        if after is not None:
            self._stream.wait_event(after)
        self._rooms = [torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    @property
    def address(self) -> int:
        """Where the first part lies, always."""
        return self._rooms[0].data_ptr()

    def parts(self, tensor: Tensor) -> Iterator[Tensor]:
        """The bytes of a contiguous tensor that nobody changes meanwhile; each part until the next is asked for."""
        sent: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        for number, part in enumerate(tensor.detach().view(-1).view(torch.uint8).split(PART_BYTES)):
            room = self._rooms[number % 2][: len(part)]
            with torch.cuda.stream(self._stream):
                room.copy_(part, non_blocking=True)
                sent.append((room, self._stream.record_event()))
            if len(sent) == 2:
                yield _arrived(*sent.popleft())
        yield _arrived(*sent.popleft())


def _arrived(room: Tensor, event: "torch.cuda.Event") -> Tensor:
    event.synchronize()
    return room
