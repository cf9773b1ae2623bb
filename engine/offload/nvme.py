"""Optimizer states in a file (ZeRO-Infinity: Rajbhandari et al., 2021, arXiv:2104.07857).

A step reads one sub-group after another into a ring of buffers, updates it in memory and writes it back. Reads run
ahead and writes run behind, so the disk and the optimizer work at the same time.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

from torch import Tensor

from engine.offload.direct_io import aligned, create_on_all_ranks, wait
from engine.offload.layout import Layout, SubGroup, round_to_blocks

BUFFERS = 4  # sub-groups in memory: one is updated, two are read ahead, one is written


class NvmeStates:
    """Flat fp32 states by kind ("parameter" is the master weight) in a scratch file."""

    def __init__(self, layout: Layout, kinds: Sequence[str], folder: str | None) -> None:
        """Raises OSError on all ranks if the disk of one rank is full. Every rank calls."""
        self.layout, self.kinds = layout, list(kinds)
        self._file = create_on_all_ranks(folder, len(kinds) * layout.length * 4)
        self._buffers: list[dict[str, Tensor]] = []
        self._writes: dict[int, list[Future[None]]] = {}  # pending, by buffer

    def add(self, kind: str) -> None:
        """Reserve disk space for another kind of state."""
        self.wait()
        self._file.grow((len(self.kinds) + 1) * self.layout.length * 4)
        self.kinds.append(kind)
        self._buffers.clear()

    def iterate(
        self, groups: Sequence[SubGroup], *, read: Iterable[str], write: Iterable[str]
    ) -> Iterator[tuple[SubGroup, dict[str, Tensor]]]:
        """Yield each sub-group with its flat tensors by kind.

        Tensors of the kinds in `read` hold the stored values. Those of `write` are stored when the next sub-group is
        requested. The last writes may be pending at the end; `wait` waits for them.
        """
        self.wait()
        read, write = list(read), list(write)
        buffers = self._ring(len(groups))
        reads: list[list[Future[None]]] = []
        for index, group in enumerate(groups):
            while len(reads) < min(len(groups), index + max(1, buffers - 1)):
                reads.append(self._start_read(groups[len(reads)], len(reads) % buffers, read))
            wait(reads[index])
            states = {kind: tensor[: group.size] for kind, tensor in self._buffers[index % buffers].items()}
            yield group, states
            writes = [self._file.write(states[kind], self._offset(kind, group.start)) for kind in write]
            self._writes[index % buffers] = [future for futures in writes for future in futures]

    def read(self, kind: str, shard: int) -> Tensor:
        """Return a copy of the elements of one shard, flat."""
        self.wait()
        values = aligned(round_to_blocks(self.layout.sizes[shard]))
        wait(self._file.read(values, self._offset(kind, self.layout.offsets[shard])))
        return values[: self.layout.sizes[shard]]

    def write(self, kind: str, shard: int, values: Tensor) -> None:
        """Replace the elements of one shard, and the padding in its last block."""
        self.wait()
        flat = aligned(round_to_blocks(values.numel()))
        flat[: values.numel()].view(values.shape).copy_(values.detach())
        wait(self._file.write(flat, self._offset(kind, self.layout.offsets[shard])))

    def wait(self) -> None:
        """Wait until all writes are in the file. Raises OSError if one failed."""
        for buffer in list(self._writes):
            wait(self._writes.pop(buffer))

    @property
    def bytes(self) -> int:
        """Return the size of the file."""
        return self._file.size

    @property
    def buffer_bytes(self) -> int:
        """Return the host memory of the buffers."""
        return sum(tensor.nbytes for buffer in self._buffers for tensor in buffer.values())

    def _offset(self, kind: str, element: int) -> int:
        return 4 * (self.kinds.index(kind) * self.layout.length + element)

    def _ring(self, groups: int) -> int:
        """Allocate missing buffers; return how many buffers an iteration over `groups` sub-groups uses."""
        count = min(BUFFERS, max(1, groups))
        while len(self._buffers) < count:
            self._buffers.append({kind: aligned(self.layout.largest) for kind in self.kinds})
        return count

    def _start_read(self, group: SubGroup, buffer: int, kinds: Sequence[str]) -> list["Future[None]"]:
        wait(self._writes.pop(buffer, []))
        tensors = {kind: self._buffers[buffer][kind][: group.size] for kind in kinds}
        return [f for kind in kinds for f in self._file.read(tensors[kind], self._offset(kind, group.start))]
