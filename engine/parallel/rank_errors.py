"""What a rank says when an error ends it: the first one its own traceback, the others whose error it was.

A rank that ends takes the others along: their collectives fail then, with words about a connection. So the first leaves
its error in the rendezvous store, and those that lost touch print that in the place of a traceback of theirs.
"""

import sys
import time
from types import TracebackType

from torch.distributed import DistError, Store

KEY = "ended first"
PATIENCE = 2.0  # seconds: a connection may be gone before the one who left has said why
MOST = 2000  # characters of an error


def install(store: Store, rank: int) -> None:
    """From now on an exception that nobody catches ends this rank so. `store` is shared by all ranks."""
    inner = sys.excepthook

    def said(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        first = None if isinstance(problem, KeyboardInterrupt) else _first(store, rank, problem)
        if first is None:
            inner(kind, problem, trace)
        else:
            print(f"rank {rank} ends: {first}", file=sys.stderr, flush=True)

    sys.excepthook = said


def _first(store: Store, rank: int, problem: BaseException) -> str | None:
    """Who ended before, and by what; None where it is this rank that did."""
    try:
        if not _lost_touch(problem):
            store.compare_set(KEY, "", f"rank {rank} ended by {type(problem).__name__}: {problem}"[:MOST])
            return None
        until = time.monotonic() + PATIENCE
        while not store.check([KEY]):
            if time.monotonic() > until:
                return None
            time.sleep(0.05)
        return store.get(KEY).decode()
    except RuntimeError:
        if rank == 0 or not _lost_touch(problem):
            return None
        return "rank 0 ended, and what it said says why"  # the store was with it


def _lost_touch(problem: BaseException) -> bool:
    """Whether another rank is not there any more; Gloo says so by plain RuntimeErrors."""
    gloo = isinstance(problem, RuntimeError) and "/gloo/" in str(problem)
    return gloo or isinstance(problem, DistError | LostMate)


class LostMate(RuntimeError):
    """A rank that this one waits for has ended, or does nothing any more."""
