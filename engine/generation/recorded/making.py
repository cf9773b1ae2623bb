"""From a forward to a program that stands for it, and whether it does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.generation.packed import Forward, PackedLinears
from engine.generation.recorded.lowering import lower
from engine.generation.recorded.program import Program
from engine.generation.recorded.recording import Layer, Recorder

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest logit


def recorded(
    module: nn.Module, packs: PackedLinears, forward: Callable[..., Tensor], inputs: Sequence[Any], rows: int
) -> Program:
    """What `forward` of `inputs` calls, with the module's packs for its linear layers. Raises Unrecordable."""
    recorder = Recorder(module, inputs)

    def through(layer: nn.Module, product: Forward) -> Forward:
        return lambda x: recorder.call(product, (x,), {}, as_=Layer(layer))

    with packs.applied(through), recorder.watching():
        output = forward(*inputs)
    return Program(lower(recorder.finish(output), packs, rows))


def unlike(right: Tensor, replayed: Tensor) -> str | None:
    """Why a replay is not to be used whose logits should be `right`; None where they agree but for rounding."""
    off = (replayed.float() - right.float()).abs().max()
    if bool(off <= TOLERANCE.get(right.dtype, 5e-2) * right.abs().max()):
        return None
    return f"its calls depend on the tokens: logits differ by {off:.2g}"
