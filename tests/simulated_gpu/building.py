"""Compile device.cpp into a shared library, once for each version of PyTorch and of the source.

This module does not import torch.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCES = [Path(__file__).with_name(name) for name in ("device.cpp", "books.h")]


def torch_folder() -> Path:
    """Return the folder in which PyTorch is installed."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def unavailable_reason() -> str | None:
    """Return why this machine cannot simulate a device, or None if it can."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "this build of PyTorch has its own CUDA kernels"
    return None if (torch_folder() / "lib" / "libtorch_cpu.so").exists() else "this build of PyTorch is not for Linux"


def library() -> Path:
    """Return the path of the library. Compile it (ten seconds) if necessary. Raise CalledProcessError if g++ fails."""
    text = b"".join(source.read_bytes() for source in (*SOURCES, Path(__file__)))
    key = hashlib.sha256(text + version("torch").encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerochat" / "simulated_gpu"
    path = folder / f"{key}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
    return path


def _compile(library: Path) -> None:
    torch = torch_folder()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled = Path(folder) / library.name
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *include, str(SOURCES[0]), "-o", str(compiled)]
        subprocess.run([*command, *libraries], check=True)
        compiled.replace(library)
