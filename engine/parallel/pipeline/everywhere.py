"""What each rank of a pipeline holds by name, brought to all of them one tensor after another."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engine.parallel import dist
from engine.parallel.pipeline.piece import Piece


def everywhere(piece: Piece, mine: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of all pieces, on every rank, the first piece's first; a tied one comes once.

    `mine` is gone through when it is this rank's turn; it may be collective among the ranks that hold the same piece.
    """
    group, device, seen = dist.along_pipeline(), dist.world().device, set[str]()
    for turn in range(piece.size):
        own = iter(mine) if turn == piece.rank else None
        while True:
            found = next((each for each in own if each[0] not in seen), None) if own is not None else None
            form = None if found is None else (found[0], found[1].shape, found[1].dtype)
            form = dist.broadcast_object(form, source=turn, group=group)
            if form is None:
                break
            name, shape, dtype = form
            seen.add(name)
            whole = torch.empty(shape, dtype=dtype, device=device) if found is None else found[1].contiguous()
            yield name, dist.broadcast(whole, source=turn, group=group)
