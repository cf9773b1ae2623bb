"""Imports that cost less: what they make stays until the process ends, so the cycle collector need not walk it.

A rank imports 600,000 objects (torch, transformers), and Python's collector goes over them again and again while
they come, and later whenever many records or tokens are made. It took a fifth of the time of the imports, and a third
of the time in which the demo's rows are made (2026-11-21, 2 cores).
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def kept_for_good() -> Iterator[None]:
    """What is made inside is never looked at by the collector, which is on again afterwards if it was before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
