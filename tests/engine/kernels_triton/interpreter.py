"""Triton's interpreter, put right where it errs.

It keeps bf16 as the 16 bits of an integer, and its dot multiplies those (triton 3.7.1; other operations convert). Here
a dot of bf16 gets the same numbers in fp32, in which products of two bf16 are exact, as tensor cores have them. And it
cuts fp32 off where a GPU rounds to the nearest bf16, of two the even one.

It also puts its own functions into the language again at every call of a function by a kernel, a quarter of its time;
here once a module of such functions, beside once a launch.
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


def rounded(numbers: Any) -> Any:
    """The bits of fp32 numbers (numpy) as bf16."""
    bits = numbers.astype(np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), nearest)


def mend() -> None:
    _mend_bf16()
    _patch_once_a_module()


def _mend_bf16() -> None:
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest)

    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return interpreter.TensorHandle(rounded(source.data), to.scalar)
        return cast(self, source, to)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl


def _patch_once_a_module() -> None:
    function = interpreter.InterpretedFunction
    call, done = function.__call__, set[str]()

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in done:
            done.add(self.fn.__module__)
            return call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    function.__call__ = __call__
