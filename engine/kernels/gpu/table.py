"""Compile every kernel to machine code for several generations of GPUs, without a GPU, and tabulate what each takes.

    python -m engine.kernels.gpu.table            writes the table into docs/engineering/kernels.md
    python -m engine.kernels.gpu.table --check    fails where a kernel does not compile, or takes other than the page
                                                  says (unless that tells of another Triton)

The compiler is the one that Triton brings along.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from re import search

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.gpu.launch import H200, Card
from engine.kernels.gpu.variants import Variant, products, variants

PAGE = Path(__file__).parents[3] / "docs" / "engineering" / "kernels.md"
BEGIN, END = "<!-- compiled kernels: written by engine.kernels.gpu.table -->", "<!-- end of compiled kernels -->"
# Shared memory a program may have, bytes: CUDA C++ programming guide, compute capabilities.
TABULATED = [Card(80, 163 * 1024), Card(90, 227 * 1024), Card(100, 227 * 1024)]
SMALL = [Card(86, 99 * 1024), Card(120, 99 * 1024)]  # 8.9 is to these kernels what 8.6 is
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32  # a multiprocessor of any that is tabulated
UNITS = {"tcgen05.mma": "tcgen05", "wgmma.mma_async": "wgmma", "mma.sync": "mma"}


@dataclass(frozen=True)
class Compiled:
    """What one program of a kernel takes: registers a thread, bytes of stack a thread (spills), shared memory bytes."""

    registers: int
    stack: int
    shared: int
    warps: int
    tensor_cores: str

    def programs(self, on: Card) -> int:
        """How many run at once on a multiprocessor."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        by_shared = (on.shared + 1024) // (self.shared + 1024)
        return min(REGISTERS // registers, by_shared, THREADS // (32 * self.warps), PROGRAMS)


def compiled(variant: Variant, on: Card) -> Compiled:
    """Compile for such a card. Raises Triton's error, or RuntimeError where it asks for more than a GPU has."""
    source = ASTSource(variant.kernel, variant.signature(), variant.constants, variant.attributes())
    kernel = triton.compile(source, target=GPUTarget("cuda", on.capability, 32), options=variant.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    unit = next((name for instruction, name in UNITS.items() if instruction in kernel.asm["ptx"]), "")
    if kernel.metadata.shared > on.shared:
        taken = f"{kernel.metadata.shared} of {on.shared} bytes of shared memory"
        raise RuntimeError(f"{variant.name} takes {taken} on sm_{on.capability}")
    stack = _number("STACK", usage) + _number("LOCAL", usage)
    return Compiled(_number("REG", usage), stack, kernel.metadata.shared, kernel.metadata.num_warps, unit)


def table() -> str:
    """One line a kernel, one column a GPU generation."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield f"Compiled by Triton {triton.__version__}; not yet measured on a GPU."
    yield ""
    yield "| kernel | warps | " + " | ".join(f"sm_{on.capability}" for on in TABULATED) + " |"
    yield "| --- | --- |" + " --- |" * len(TABULATED)
    rows = [variants(on) for on in TABULATED]
    for same in zip(*rows, strict=True):
        cells = []
        warps = []
        for on, variant in zip(TABULATED, same, strict=True):
            kernel = compiled(variant, on)
            warps.append(str(kernel.warps))
            cells.append(_cell(kernel, on))
        yield f"| {same[-1].name} | {warps[-1]} | {' | '.join(cells)} |"


def _cell(kernel: Compiled, on: Card) -> str:
    shared = f"{kernel.shared / 1024:.0f} KB" if kernel.shared else "0"
    cell = f"{kernel.registers}, {kernel.stack}, {shared}, {kernel.programs(on)}"
    return f"{cell} ({kernel.tensor_cores})" if kernel.tensor_cores else cell


def _number(name: str, usage: str) -> int:
    found = search(rf"\b{name}:(\d+)", usage)
    assert found, f"cuobjdump says nothing about {name}: {usage}"
    return int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.gpu.table", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is out of date")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    new = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if not check:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    for variant in variants(H200):
        compiled(variant.of_ones(), H200)
    for on in SMALL:
        for variant in products(on):
            compiled(variant, on)
    if f"Triton {triton.__version__};" not in text:
        print(f"{PAGE} tells of another Triton; with {triton.__version__} all kernels compile and fit")
    elif new != text:
        print(f"{PAGE} is out of date: run python -m engine.kernels.gpu.table", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
