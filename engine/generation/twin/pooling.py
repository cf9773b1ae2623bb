"""One rank of a CPU host generates for all of them, with the threads of all.

A decode step reads every weight, however few sequences it serves, and the ranks of a host read through the same memory.
So one rank that serves the sequences of all reads a fraction of what they would read each for themselves, packs the
weights once, and has no neighbour that ends earlier. Small models, whose weights stay in the caches, gain nothing and
would wait for threads at each operation: there each rank generates for itself, as on GPUs and over several hosts.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.parallel import dist
from engine.parallel.shared_memory import share

FEWEST_BYTES = 64 << 20  # of weights
MOST_THREADS = 16  # more wait for each other longer than they compute
ASK_EVERY = 0.01  # seconds


class Pool:
    """`ranks` whose answers are generated together, by the one that `leads`, with so many `threads`.

    `ended` (1,) int64 is memory that they share: how often the leader has left `at_work`.
    """

    def __init__(self, ranks: int, leads: bool, threads: int, ended: Tensor | None = None) -> None:
        self.ranks, self.leads, self.threads = ranks, leads, threads
        self._ended, self._times = ended, 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within the block the leader has the threads of all. The others leave it after the leader, however long that
        takes: a collective would give up waiting.
        """
        self._times += 1
        if self._ended is None:
            yield
        elif self.leads:
            own = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            try:
                yield
            finally:
                torch.set_num_threads(own)
                self._ended += 1
        else:
            yield
            while int(self._ended) < self._times:
                time.sleep(ASK_EVERY)


def alone() -> Pool:
    """This rank generates for itself."""
    return Pool(1, True, torch.get_num_threads())


def pool_of(module: nn.Module) -> Pool:
    """All ranks, where that pays for `module`; else this one alone. Collective, and alike on every rank."""
    world = dist.world()
    if world.size == 1 or sum(p.numel() * p.element_size() for p in module.parameters()) < FEWEST_BYTES:
        return alone()
    threads = sum(dist.gather_objects(torch.get_num_threads()))
    too_many = dist.broadcast_object(threads > min(MOST_THREADS, _cores()))
    memory = None if too_many or world.device.type != "cpu" else share(8)
    if memory is None:  # several hosts, or GPUs
        return alone()
    return Pool(world.size, world.leads, threads, memory.view(torch.int64))


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
