"""Run a function on several ranks over Gloo on loopback, each a fresh process."""

import io
import multiprocessing
import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on `size` ranks with the process group up; the results in rank order.

    `function` must be importable (top level of a test module). What a rank raises is raised here.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        context.Process(target=_rank, args=(function, rank, size, port, results, arguments)) for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    found: dict[int, Any] = {}
    try:
        for _ in workers:
            rank, value, error = _next(results, workers)
            if error is not None:
                raise AssertionError(f"rank {rank}:\n{error}")
            found[rank] = torch.load(io.BytesIO(value), weights_only=False)
    finally:
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.kill()
    return [found[rank] for rank in range(size)]


def _next(results: Any, workers: list[Any]) -> tuple[int, bytes, str | None]:
    """The next result; an error where all processes are gone without one (a function that they can't import)."""
    for _ in range(240):
        alive = any(worker.is_alive() for worker in workers)
        try:
            return results.get(timeout=1)  # type: ignore[no-any-return]
        except queue.Empty:
            assert alive, "the ranks ended without a result; their output says why"
    raise AssertionError("no result within 240 s")


def _rank(
    function: Callable[..., Any], rank: int, size: int, port: int, results: Any, arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    from engine.parallel import dist

    try:
        dist.start("test", device="cpu")
        # As bytes: a queue passes tensors by shared memory, which goes when this process ends.
        kept = io.BytesIO()
        torch.save(function(*arguments), kept)
        results.put((rank, kept.getvalue(), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        dist.stop()
