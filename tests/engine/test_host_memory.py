"""The reuse of freed memory, measured by the page faults of a new process."""

import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "engine" / "host_memory.py"
PROGRAM = """
import ctypes, resource, runpy, sys

file = runpy.run_path(sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for configure in (lambda: None, file["reuse_freed_memory"], file["return_freed_memory"]):
    configure()
    faults(2**26)
    print(faults(2**26))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator is glibc's")
def test_freed_blocks_are_reused_until_memory_must_be_returned() -> None:
    """Count the page faults of the second write to 64 MiB."""
    command = [sys.executable, "-c", PROGRAM, str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    default, reused, returned = map(int, done.stdout.split())
    pages = 2**26 // 2**21  # pages may be huge
    assert default > pages
    assert reused < 4
    assert returned > pages
