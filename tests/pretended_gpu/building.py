"""The shared library of device.cpp, compiled once for a version of PyTorch and of the source. Does not import torch."""

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
    """Where PyTorch is installed."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def lacking() -> str | None:
    """Why there can be no pretended device here; None where there can."""
    if shutil.which("g++") is None:
        return "no g++"
    if find_spec("triton") is None:
        return "no Triton"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "PyTorch has kernels for CUDA of its own"
    return None if (torch_folder() / "lib" / "libtorch_cpu.so").exists() else "no PyTorch for Linux"


def library() -> Path:
    """The library; compiles it, in ten seconds, where that was not done before. Raises CalledProcessError."""
    text = b"".join(source.read_bytes() for source in (*SOURCES, Path(__file__)))
    key = hashlib.sha256(text + version("torch").encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerochat" / "pretended_gpu"
    found = folder / f"{key}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{key}.lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        if not found.exists():
            _compile(found)
    return found


def _compile(library: Path) -> None:
    torch = torch_folder()
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        made = Path(place) / library.name
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        linked = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *include, str(SOURCES[0]), "-o", str(made)]
        subprocess.run([*command, *linked], check=True)
        made.replace(library)
