"""Compile every Triton kernel to machine code without a GPU: argument types, constants and options of its launches.

    python -m tests.engine.kernels_triton.variants

The compiler is part of Triton. The command fails if a kernel does not compile, needs more shared memory than the GPU
has, or keeps much of its work in memory because the registers of its threads are full. Shared memory per program: CUDA
C++ programming guide, compute capabilities.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from engine.kernels.decode_attention import Prompts
from engine.kernels.token_logprobs import Head
from engine.kernels_triton import decode_attention as attention
from engine.kernels_triton import sample
from engine.kernels_triton import token_logprobs as logprobs

TRITON_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
MOST_SPILLED = 512  # bytes of a thread; some compilers spill a few registers outside of the loop
ALIGNED = ("width", "of_values", "vocabulary", "length")  # and every stride: multiples of 16 in real models


@dataclass(frozen=True)
class Variant:
    """One kernel with one set of constants. `types` are those of arguments that are not int32."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]

    def signature(self) -> dict[str, str]:
        names = self.kernel.arg_names
        return {n: "constexpr" if n in self.constants else self.types.get(n, "i32") for n in names}

    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """What Triton finds out about arguments at a launch: pointers and sizes that are multiples of 16."""
        known = zip(self.kernel.params, self.signature().items(), strict=True)
        divisible = (
            i
            for i, (of, (n, t)) in enumerate(known)
            if (t[0] == "*" and not of.do_not_specialize_on_alignment) or n in ALIGNED or n.startswith("stride")
        )
        return {(i,): [["tt.divisibility", 16]] for i in divisible}


class Card(NamedTuple):
    """A GPU: its compute capability (86 is 8.6), and the bytes of shared memory of a program."""

    capability: int
    shared: int


H200 = Card(90, 227 * 1024)
SMALL = Card(86, 99 * 1024)  # the least shared memory of the supported GPUs


def variants() -> list[tuple[Variant, Card]]:
    """Return each kernel with the GPU to compile it for.

    Kernels with tile products need shared memory, so they are also compiled for the GPU that has the least.
    """
    products = [(variant, on) for on in (H200, SMALL) for variant in _decode_attention(on)]
    return [*products, *((variant, H200) for variant in (*_token_logprobs(), *_sample()))]


def check(variant: Variant, on: Card) -> str | None:
    """Compile a kernel; return what is wrong with it, or None."""
    source = ASTSource(variant.kernel, variant.signature(), variant.constants, variant.attributes())
    try:
        kernel = triton.compile(source, target=GPUTarget("cuda", on.capability, 32), options=variant.options)
    except Exception as problem:  # the compiler's errors have no common type
        return f"{variant.name} does not compile for sm_{on.capability}: {problem}"
    if kernel.metadata.shared > on.shared:
        return f"{variant.name} needs {kernel.metadata.shared} of {on.shared} bytes of shared memory"
    if (spilled := _spilled_bytes(kernel.asm["cubin"])) > MOST_SPILLED:
        return f"{variant.name} spills {spilled} bytes of registers of a thread on sm_{on.capability}"
    return None


def _spilled_bytes(code: bytes) -> int:
    """Return the bytes of memory that a thread uses as registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    return int(stack)


def recompilations() -> Iterator[str]:
    """Yield a message for each kernel that the launches of different steps would compile more than once."""
    keys: dict[str, set[str]] = {}
    for kernel in (
        logprobs.reduce_kernel,
        logprobs.gradient_kernel,
        attention.share_kernel,
        attention.join_kernel,
        sample.row_kernel,
    ):
        backend = make_backend(GPUTarget("cuda", H200.capability, 32))
        bind, name = create_function_from_signature(kernel.signature, kernel.params, backend), kernel.__name__
        name = f"{kernel.__module__.rpartition('.')[2]}.{name}"

        def record(*args: Any, bind: Any = bind, name: str = name, grid: Any, warmup: bool, **named: Any) -> None:
            _, specialization, options = bind(*args, **named)
            keys.setdefault(name, set()).add(f"{specialization} {options}")

        kernel.run = record
    for tokens, columns in ((65, 5000), (66, 4096), (68, 4097), (96, 1), (4096, 1001)):
        vector, products, biases = torch.zeros(tokens + 1)[1:], torch.zeros(tokens, columns), torch.zeros(columns + 1)
        head = Head(temperature=1.0, softcap=None)
        for rows, bias in ((vector, biases[1:]), (torch.zeros(tokens), biases[:-1])):
            logprobs.reduce_block(head, products, bias, rows.long())
            of_rows = rows, rows, rows, rows
            logprobs.block_gradient(head, products, bias, rows.long(), *of_rows, torch.bfloat16)
    attention.shared_memory_and_multiprocessors = lambda device: (H200.shared, 4)
    for batch in (1, 2, 3, 4, 7, 16, 64, 130):
        room, own = (5, 1) if batch == 3 else (64, 192)  # the trial of a model has a small cache
        prompt, cache = torch.zeros(8, 2, room, 64), torch.zeros(8, 2, own, 64)
        of_rows = torch.zeros(6, batch, dtype=torch.int64)
        prompts = Prompts(prompt, prompt, *of_rows[:3])
        # Two heads with an odd number of splits: the totals of one sequence begin at no multiple of 16.
        attention.decode_attention(torch.zeros(batch, 2, 64), cache, cache, prompts, *of_rows[3:5], 1.0)
    for top_k in (1, 16, 50):
        sample.sample(torch.zeros(2, 800), torch.zeros(2), temperature=1.0, top_k=top_k, top_p=0.9, min_p=0.0)
    for name, different in keys.items():
        if len(different) > 1:
            yield f"{name} would be compiled {len(different)} times:\n  " + "\n  ".join(sorted(different))


def main() -> int:
    problems = [problem for variant, on in variants() if (problem := check(variant, on)) is not None]
    problems += recompilations()
    print(*problems, sep="\n")
    return len(problems) > 0


def _variant(name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Variant:
    """Sorts Triton's own options out of the constants, as a launch does."""
    options = {key: constants[key] for key in constants if key.startswith("num_")}
    return Variant(name, kernel, types, {k: v for k, v in constants.items() if k not in options}, options)


def _pointers(of: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{of}")


def _token_logprobs() -> Iterator[Variant]:
    floats = _pointers("fp32", "products", "lses", "entropies", "logits", "d_logprobs", "d_entropies")
    for of in ("bf16", "fp32"):
        types = {
            **floats, **_pointers(of, "bias", "d_products"), "targets": "*i64", "inverse_temperature": "fp32",
            "softcap": "fp32",
        }  # fmt: skip
        for label, bias, softcap in ((of, None, None), (f"{of}, bias and soft cap", torch.zeros(1), 30.0)):
            options = logprobs.constants(bias, softcap) | ({"bias": None} if bias is None else {})
            yield _variant(f"token_logprobs reduce, {label}", logprobs.reduce_kernel, types, options)
            constants = {**options, "HAS_ENTROPY": True}
            yield _variant(f"token_logprobs gradient, {label}", logprobs.gradient_kernel, types, constants)


def _decode_attention(on: Card) -> Iterator[Variant]:
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = (
        (64, 1, bf16, False), (128, 4, bf16, False), (128, 8, bf16, True), (64, 1, fp32, False), (256, 2, bf16, False),
        (128, 4, fp32, False), (256, 2, fp32, False), (512, 8, bf16, False),
    )  # fmt: skip
    for width, group, dtype, extras in cases:
        of = TRITON_TYPES[dtype]
        types = {
            **_pointers(of, "query", "keys", "values", "prompt_keys", "prompt_values"),
            **_pointers("i64", "slots", "lengths", "prompt_slots", "prompt_lengths", "firsts"),
            **_pointers("fp32", "partial", "highest", "totals"), "scale": "fp32", "softcap": "fp32",
        }  # fmt: skip
        constants = {
            **attention.launch_options(width, width, group, dtype, on.shared), "GROUP": group,
            "HAS_WINDOW": extras, "HAS_SOFTCAP": extras, "PRECISION": "ieee",
        }  # fmt: skip
        label = ", ".join([of, f"{group} head{'s' if group > 1 else ''} of {width}", *["window and soft cap"] * extras])
        yield _variant(f"decode_attention, {label}", attention.share_kernel, types, constants)
    types = {**_pointers("fp32", "partial", "highest", "totals"), "out": "*bf16"}
    constants = {"SPLITS": attention.MOST_SPLITS, "BV": 128, "num_warps": 4}
    yield _variant("decode_attention join", attention.join_kernel, types, constants)


def _sample() -> Iterator[Variant]:
    types = {
        **_pointers("fp32", "logits", "uniforms", "logprobs"), "tokens": "*i64",
        **dict.fromkeys(("inverse_temperature", "top_p", "log_min_p"), "fp32"),
    }  # fmt: skip
    kinds = dict.fromkeys(("GREEDY", "HAS_TOP_K", "HAS_TOP_P", "HAS_MIN_P"), False)
    for label, used in (
        ("greedy", ["GREEDY"]),
        ("min-p", ["HAS_MIN_P"]),
        ("all filters", ["HAS_TOP_K", "HAS_TOP_P", "HAS_MIN_P"]),
    ):
        constants = {**kinds, **dict.fromkeys(used, True), "TILE": sample.TILE, "num_warps": 16}
        yield _variant(f"sample, {label}", sample.row_kernel, types, constants)


if __name__ == "__main__":
    sys.exit(main())
