"""Virtual environments of the peers, one each, so that their pinned packages do not conflict with ours.

The first use creates an environment from the package index, in `zerochat/peers` of the user's cache. `ZEROCHAT_PEERS`
sets another folder. The name of an environment's folder contains a hash of its packages.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import BenchFailed

TORCH = "torch==2.13.0"
TRL = ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0")
TRL_PPO = ("trl==0.19.1", "transformers==4.53.3", "accelerate==1.8.1", "datasets==3.6.0", "rich")
DEEPSPEED = ("deepspeed==0.19.8", "transformers==5.23.0", "accelerate==1.15.0")
LIMIT_SECONDS = 1800.0


def environment(name: str, packages: Sequence[str]) -> Path:
    """Return the Python of a virtual environment with PyTorch and `packages`. Create the environment if it is missing.

    Raises BenchFailed if a package cannot be installed.
    """
    requirements = [TORCH, *packages]
    folder = _root() / f"{name}-{hashlib.sha256(' '.join(requirements).encode()).hexdigest()[:10]}"
    python = folder / "bin" / "python"
    _root().mkdir(parents=True, exist_ok=True)
    with (_root() / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            _create(folder, python, requirements)
    return python


def _create(folder: Path, python: Path, packages: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    print(f"creating the environment {folder.name} (once): {' '.join(packages)}", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    # PyTorch first: a package that admits a newer version would install that version.
    _run([str(python), "-m", "pip", "install", "--quiet", packages[0]])
    _run([str(python), "-m", "pip", "install", "--quiet", *packages])
    (folder / "made").write_text("\n".join(packages))


def _run(command: Sequence[str]) -> None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as problem:
        raise BenchFailed(f"{' '.join(command)} did not end within {LIMIT_SECONDS:g} seconds") from problem
    if finished.returncode:
        tail = "\n".join(finished.stderr.splitlines()[-10:])
        raise BenchFailed(f"{' '.join(command)} ended with status {finished.returncode}:\n{tail}")


def _root() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ZEROCHAT_PEERS") or Path(cache) / "zerochat" / "peers")
