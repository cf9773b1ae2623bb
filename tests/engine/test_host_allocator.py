"""What freed memory does, seen in the page faults of a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "engine" / "host_allocator.py"
PROGRAM = """
import ctypes, resource, runpy, sys
own = runpy.run_path(sys.argv[1])
for name in sys.argv[2].split():
    own[name]()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def use(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

use(2**26)
print(use(2**26))
"""


def faults(*called: str) -> int:
    """Page faults of writing to 64 MiB for the second time, after these functions."""
    command = [sys.executable, "-c", PROGRAM, str(FILE), " ".join(called)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={})
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_blocks_are_used_again_until_memory_is_to_go_back() -> None:
    assert faults() > 2**26 // 2**21  # a page each, be they large ones
    assert faults("reuse_freed_memory") < 4
    assert faults("reuse_freed_memory", "return_freed_memory") > 2**26 // 2**21
