"""Compiling and loading the C files of this folder.

A file is compiled once, for the processor of this machine. The library is stored in the user's cache directory under
a name that contains a hash of its inputs. It shares PyTorch's threads, because a second OpenMP library would start
threads of its own, which spin on the cores that PyTorch's threads need.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
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
)
# Sums are not reordered: a number has the same bits at every position of a vector.
EXACT = ("-fno-associative-math", "-fno-reciprocal-math", "-fsigned-zeros", "-ffp-contract=off")
SWITCH = "ZEROCHAT_HOST_KERNELS"  # 0 in the environment disables the kernels


@cache
def library(name: str, *, exact: bool = False) -> ctypes.CDLL | None:
    """Return the compiled functions of `name`.c; None if they cannot be compiled, and log the reason once.

    `exact` does not let the compiler reorder sums.
    """
    try:
        if os.environ.get(SWITCH) == "0":
            raise Unavailable(f"{SWITCH}=0")
        return _loaded(HERE / f"{name}.c", (*FLAGS, *EXACT) if exact else FLAGS)
    except (Unavailable, OSError, subprocess.SubprocessError) as reason:
        log.info("%s.c is not used, PyTorch's operators run instead: %s", name, reason)
        return None


class Unavailable(Exception):
    """A requirement of compiled kernels is missing."""


def _loaded(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    with _folder() as folder:
        made = _compiled(source, flags, folder)
        try:
            return ctypes.CDLL(str(made))
        except OSError:  # a stored file may be truncated after a crash: compile it again
            made.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compiled(source, flags, folder)))


def _compiled(source: Path, flags: Sequence[str], folder: Path) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise Unavailable("there is no C compiler")
    openmp = _openmp()
    made = folder / f"{source.stem}-{_fingerprint(source, compiler, flags, openmp)}.so"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as space:
            part, whole = Path(space) / "part.o", Path(space) / "whole.so"
            _run([compiler, *flags, "-c", str(source), "-o", str(part)])
            _run([compiler, "-shared", str(part), openmp, "-lm", "-o", str(whole)])
            whole.replace(made)  # atomic: another process may compile the same file
    return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()[-400:]}")


def _openmp() -> str:
    """Return the path of the OpenMP library that PyTorch has loaded; PyTorch's own if other packages loaded theirs."""
    if not torch.backends.openmp.is_available():
        raise Unavailable("PyTorch runs without OpenMP")
    with open("/proc/self/maps") as maps:  # Linux; other systems raise OSError
        loaded = {line.split(maxsplit=5)[-1].strip() for line in maps}
    found = [path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp5"))]
    if not found:
        raise Unavailable("PyTorch's OpenMP library was not found")
    package = str(Path(torch.__file__).parent)  # some wheels have libraries in torch.libs, next to it
    return min(found, key=lambda path: (not path.startswith(package), path))


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield the folder of compiled files, which other users must not be able to write to because its files are run.

    If there is none, yield a temporary folder, which is deleted after loading.
    """
    kept = _kept()
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="zerochat-kernels-") as passing:
        yield Path(passing)


def _kept() -> Path | None:
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerochat" / "kernels"
    try:
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = kept.stat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(kept, os.W_OK):
            return kept
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        pass
    return None


def _fingerprint(source: Path, compiler: str, flags: Sequence[str], openmp: str) -> str:
    """Return a hash of the inputs of a compiled file, with the processor: machines may share a home directory."""
    about = hashlib.sha256()
    for text in (source.read_bytes(), *(header.read_bytes() for header in sorted(HERE.glob("*.h")))):
        about.update(text)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    for word in (*flags, compiler, version, openmp, platform.machine(), _processor()):
        about.update(word.encode() + b"\0")
    return about.hexdigest()[:20]


def _processor() -> str:
    """Return the instruction sets of the processor."""
    with open("/proc/cpuinfo") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
