"""Whole parameters from shards, cast and with adapters merged, written straight where they are to be.

Each rank brings its own rows into the precision that is wanted, adds its rows of the adapters' update in fp32, and
rounds once. Ranks of one host that share memory write them to their place there and are done. Otherwise rows of many
parameters go out together in buckets, one all-gather each, while the next is being filled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.generation.twin.cuts import Cut
from engine.loading import local_rows
from engine.merging import active_matrices, update_rows
from engine.parallel import dist, dtensors

BUCKET_BYTES = 64 << 20  # of one rank's rows; two such buckets and what is gathered from them are in memory


@dataclass(frozen=True)
class Piece:
    """One parameter: the live one, sharded or whole, the LoRA layer over it, and where its values are wanted.

    `cut` is the part of it that `target` is; None for all.
    """

    live: Tensor
    adapter: nn.Module | None
    target: Tensor
    cut: Cut | None = None

    def put(self, rows: Tensor, first: int) -> None:
        """Write some rows of the whole, from row `first` on."""
        if self.cut is None:
            self.target[first : first + len(rows)].copy_(rows)
        else:
            self.cut.place(rows, first, self.target)


@torch.no_grad()
def gather(pieces: Sequence[Piece], *, shared: bool = False) -> int:
    """Fill the targets; returns the bytes written. Every rank passes the same pieces.

    `shared` says that the targets are the same memory on all ranks; it is for the caller to wait until nobody reads,
    and until everybody has written.
    """
    matrices = _whole_matrices([piece.adapter for piece in pieces if piece.adapter is not None])
    to_exchange = []
    for piece in pieces:
        if not dtensors.is_whole(piece.live) and not dtensors.in_rows(piece.live):
            _copy_by_itself(piece, matrices)
        elif shared or dtensors.is_whole(piece.live):
            mine = _share_of(piece.live) if shared else slice(0, piece.live.shape[0])
            piece.put(_updated(piece, matrices, mine), mine.start)
        else:
            to_exchange.append(piece)
    for piece, first, rows in _exchanged(to_exchange, matrices):
        piece.put(rows, first)
    return sum(piece.target.numel() * piece.target.element_size() for piece in pieces)


def _share_of(live: Tensor) -> slice:
    """The rows that this rank brings: its own of a sharded parameter, its part of those of a whole one."""
    if not dtensors.is_whole(live):
        return local_rows(live.detach())
    world = dist.world()
    return slice(world.rank * live.shape[0] // world.size, (world.rank + 1) * live.shape[0] // world.size)


def rows_a_rank(live: Tensor) -> int:
    """Rows of a parameter that each rank but the last ones holds."""
    return -(-live.shape[0] // dtensors.shards(live))


Matrices = Mapping[nn.Module, list[tuple[float, Tensor, Tensor]]]


def _updated(piece: Piece, matrices: Matrices, rows: slice) -> Tensor:
    """Rows of a parameter that this rank holds, with the adapter's update; not cast where there is none."""
    part = dtensors.local(piece.live.detach())
    if dtensors.is_whole(piece.live):
        part = part[rows]
    if piece.adapter is None:
        return part
    part = part.to(piece.target.device, torch.float32)
    return part + update_rows(piece.adapter, matrices[piece.adapter], rows)  # a new tensor: `part` may be live


def _copy_by_itself(piece: Piece, matrices: Matrices) -> None:
    """A parameter that is cut otherwise than by rows (tensor parallelism while training): a collective of its own."""
    whole = dtensors.full_tensor(piece.live.detach()).to(piece.target.device)
    if piece.adapter is not None:
        whole = whole.float() + update_rows(piece.adapter, matrices[piece.adapter], slice(None))
    piece.put(whole, 0)


def _whole_matrices(adapters: Sequence[nn.Module]) -> Matrices:
    """The factors of every adapter, whole and in fp32, by layer."""
    found = {layer: active_matrices(layer) for layer in adapters}
    device = dist.world().device
    wholes: dict[int, Tensor] = {}
    pieces = []
    for _, *factors in (factor for each in found.values() for factor in each):
        for live in factors:
            wholes[id(live)] = torch.empty(live.shape, dtype=torch.float32, device=device)
            pieces.append(Piece(live, None, wholes[id(live)]))
    if pieces:
        gather(pieces)
    return {
        layer: [(scaling, wholes[id(down)], wholes[id(up)]) for scaling, down, up in factors]
        for layer, factors in found.items()
    }


def _exchanged(pieces: Sequence[Piece], matrices: Matrices) -> Iterator[tuple[Piece, int, Tensor]]:
    """(piece, first row, rows) of each rank's part of all pieces; a bucket is filled while the last is on its way."""
    flying: tuple[list[Piece], dtensors.Gathering] | None = None
    for bucket in _buckets(pieces):
        outgoing = dtensors.start_all_gather(_filled(bucket, matrices), bucket[0].live)
        if flying is not None:
            yield from _arrived(*flying)
        flying = bucket, outgoing
    if flying is not None:
        yield from _arrived(*flying)


def _buckets(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces of one precision, device and group that are to be gathered together."""
    bucket: list[Piece] = []
    size = 0
    for piece in pieces:
        mine = _padded_numel(piece) * piece.target.element_size()
        if bucket and (size + mine > BUCKET_BYTES or _kind(piece) != _kind(bucket[0])):
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += mine
    if bucket:
        yield bucket


def _kind(piece: Piece) -> tuple[object, ...]:
    return piece.target.dtype, piece.target.device, dtensors.shards(piece.live)


def _padded_numel(piece: Piece) -> int:
    return rows_a_rank(piece.live) * _row_numel(piece.live)


def _row_numel(live: Tensor) -> int:
    return live.numel() // live.shape[0]


def _filled(bucket: Sequence[Piece], matrices: Matrices) -> Tensor:
    """This rank's rows of all pieces, one after the other, each padded to what the first rank has."""
    target = bucket[0].target
    flat = torch.empty(sum(map(_padded_numel, bucket)), dtype=target.dtype, device=target.device)
    at = 0
    for piece in bucket:
        rows = _updated(piece, matrices, local_rows(piece.live.detach()))
        flat[at : at + rows.numel()].view(rows.shape).copy_(rows)
        at += _padded_numel(piece)
    return flat


def _arrived(bucket: Sequence[Piece], gathering: dtensors.Gathering) -> Iterator[tuple[Piece, int, Tensor]]:
    parts = gathering.wait()
    at = 0
    for piece in bucket:
        for rank, part in enumerate(parts):
            first = min(rank * rows_a_rank(piece.live), piece.live.shape[0])
            count = min(rows_a_rank(piece.live), piece.live.shape[0] - first)
            rows = part[at : at + count * _row_numel(piece.live)]
            yield piece, first, rows.view(count, *piece.live.shape[1:])
        at += _padded_numel(piece)
