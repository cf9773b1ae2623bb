"""Compile and load the C files of this folder.

A file is compiled once, for the processor of this machine. The library is stored in the user's cache directory under
a name that contains a hash of its inputs. It shares PyTorch's threads, because a second OpenMP library would start
threads of its own, which spin on the cores that PyTorch's threads need.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)
HERE = Path(__file__).parent


def _processor(*fields: str) -> str:
    """Return the first line of /proc/cpuinfo with one of these fields; empty if the system does not provide it."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line for line in lines if line.startswith(fields)), "")
    return ""


@cache
def is_intel() -> bool:
    """Return whether the processor is Intel's; False if the system does not provide the vendor."""
    return "GenuineIntel" in _processor("vendor_id")


# Sums may be reordered, which vectorization needs; infinities and NaN keep their meaning.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
    *(["-DINTEL"] if is_intel() else []),
)
# The libraries whose sums are not reordered: a number has the same bits at every position of a vector.
EXACT_LIBRARIES = ("linear",)
EXACT = ("-fno-associative-math", "-fno-reciprocal-math", "-fsigned-zeros", "-ffp-contract=off")
SWITCH = "ZEROCHAT_HOST_KERNELS"  # 0 in the environment disables the kernels
unavailable: dict[str, str] = {}  # why a file is not used


@cache
def library(name: str) -> ctypes.CDLL | None:
    """Return the compiled functions of `name`.c; None if they cannot be compiled. The reason is logged once."""
    try:
        if os.environ.get(SWITCH) == "0":
            raise Unavailable(f"{SWITCH}=0")
        return _loaded(HERE / f"{name}.c", (*FLAGS, *EXACT) if name in EXACT_LIBRARIES else FLAGS)
    except (Unavailable, OSError, subprocess.SubprocessError) as reason:
        log.info("%s.c is not used, PyTorch's operators run instead: %s", name, reason)
        unavailable[name] = str(reason)
        return None


def load_libraries() -> str:
    """Compile and load all C files, so that no step waits for the compiler. Return why one is not used, or ""."""
    for source in sorted(HERE.glob("*.c")):
        library(source.stem)
    return next(iter(unavailable.values()), "")


class Unavailable(Exception):
    """Raised if a requirement of compiled kernels is missing, or if compilation fails."""


def _loaded(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Load a file from the user's cache; from a temporary folder without a cache, or if its disk is full."""
    cached = _cache_folder()
    if cached is not None:
        with suppress(Unavailable, OSError):
            return _opened(source, flags, cached)
    with tempfile.TemporaryDirectory(prefix="zerochat-kernels-") as temporary:
        return _opened(source, flags, Path(temporary))


def _opened(source: Path, flags: Sequence[str], folder: Path) -> ctypes.CDLL:
    binary = _compiled(source, flags, folder)
    try:
        return ctypes.CDLL(str(binary))
    except OSError:  # a stored file may be truncated after a crash: compile it again
        binary.unlink(missing_ok=True)
        return ctypes.CDLL(str(_compiled(source, flags, folder)))


def _compiled(source: Path, flags: Sequence[str], folder: Path) -> Path:
    found = shutil.which("cc") or shutil.which("gcc")
    compiler = shlex.split(os.environ.get("CC", "")) or ([found] if found else [])
    if not compiler:
        raise Unavailable("there is no C compiler (install gcc)")
    openmp = _openmp()
    binary = folder / f"{source.stem}-{_fingerprint(source, compiler, flags, openmp)}.so"
    if not binary.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            object_file, linked = Path(temporary) / "part.o", Path(temporary) / "whole.so"
            _run([*compiler, *flags, "-c", str(source), "-o", str(object_file)])
            _run([*compiler, "-shared", str(object_file), openmp, "-lm", "-o", str(linked)])
            linked.replace(binary)  # atomic: another process may compile the same file
    return binary


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if result.returncode:
        raise Unavailable(f"{command[0]}: {' '.join(result.stderr.split())[-400:]}")


def _openmp() -> str:
    """Return the path of the OpenMP library that PyTorch has loaded; PyTorch's own if other packages loaded theirs."""
    if not torch.backends.openmp.is_available():
        raise Unavailable("PyTorch runs without OpenMP")
    if platform.system() != "Linux":
        raise Unavailable("the system is not Linux")
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in maps}
    candidates = [path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp5"))]
    if not candidates:
        raise Unavailable("PyTorch's OpenMP library was not found")
    package = str(Path(torch.__file__).parent)  # some wheels have libraries in torch.libs, next to it
    return min(candidates, key=lambda path: (not path.startswith(package), path))


def _cache_folder() -> Path | None:
    """Return the folder of compiled files; None if there is none that only this user may write to.

    The files of the folder are run, so other users must not have write access.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerochat" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        pass
    return None


def _fingerprint(source: Path, compiler: Sequence[str], flags: Sequence[str], openmp: str) -> str:
    """Return a hash of the inputs of a compiled file.

    It includes the processor, because several machines may share a home directory.
    """
    digest = hashlib.sha256()
    for text in (source.read_bytes(), *(header.read_bytes() for header in sorted(HERE.glob("*.h")))):
        digest.update(text)
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    for word in (*flags, *compiler, version, openmp, platform.machine(), _processor("flags", "Features")):
        digest.update(word.encode() + b"\0")
    return digest.hexdigest()[:20]
