"""Every kernel compiles to machine code for several generations of GPUs, fits them, and takes what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

from engine import kernels
from engine.kernels.gpu.launch import H200, Card
from engine.kernels.gpu.table import Compiled

ROOT = Path(__file__).parents[4]


def test_kernels_compile_and_the_page_says_what_they_take() -> None:
    """In a process of its own: here the kernels are declared for the interpreter."""
    command = [sys.executable, "-m", "engine.kernels.gpu.table", "--check"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_tells_of_the_triton_that_is_installed_here() -> None:
    """With that one `--check` compares every figure; with another it can't."""
    (pinned,) = re.findall(r"^triton==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"Triton {pinned};" in (ROOT / "docs" / "engineering" / "kernels.md").read_text()


def test_names_lead_to_functions_in_triton() -> None:
    for name, kernel in kernels._IN_TRITON.items():
        assert kernels._triton(kernel, name).__module__ == f"engine.kernels.gpu.{kernel}"


def test_programs_at_once() -> None:
    def programs(registers: int, shared: int, warps: int, on: Card = H200) -> int:
        return Compiled(registers, 0, shared, warps, "").programs(on)

    assert programs(128, 0, 4) == 4  # 128 x 128 registers of 65,536
    assert programs(81, 0, 8) == 2  # registers are given out in eights: 88
    assert programs(32, 100 * 1024, 4) == 2 and programs(32, 100 * 1024, 4, on=Card(80, 163 * 1024)) == 1
    assert programs(16, 0, 1) == 32
