"""Triton's interpreter, put right where it errs.

It keeps bf16 as the 16 bits of an integer, and its dot multiplies those (triton 3.7.1; other operations convert). Here
a dot of bf16 gets the same numbers in fp32, in which products of two bf16 are exact, as tensor cores have them.
"""

from typing import Any

import numpy as np
import triton.experimental.gluon  # noqa: F401  the interpreter imports it at the first kernel; the switch is off then
import triton.language as tl
from triton.runtime import interpreter


def widen(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    bits = operand.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def multiply_bf16_as_numbers() -> None:
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest)

    builder.create_dot = create_dot
