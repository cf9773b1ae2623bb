"""Every Triton kernel compiles to machine code ahead of time and fits the shared memory of the GPUs that run it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_kernels_compile_and_fit() -> None:
    """Compile in another process, because this process declares the kernels for Triton's interpreter."""
    command = [sys.executable, "-m", "tests.engine.kernels_triton.variants"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
