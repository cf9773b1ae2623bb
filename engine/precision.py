"""Compute precision: what FSDP2 casts to, and fp16's dynamic loss scale (Micikevicius et al., 2018, arXiv:1710.03740).

Master parameters and optimizer states are fp32; gradients are reduced in fp32.
"""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from engine.config import LossScale, Precision

TORCH_DTYPE: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def policy(dtype: Precision, reduce: Precision = "fp32") -> MixedPrecisionPolicy:
    """FSDP2's casts for a module with fp32 parameters that computes in `dtype` and reduces gradients in `reduce`."""
    if dtype == reduce == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=TORCH_DTYPE[dtype], reduce_dtype=TORCH_DTYPE[reduce])


@dataclass
class LossScaler:
    """The factor that keeps small fp16 gradients above zero.

    A step with a non-finite gradient is skipped. It costs one unit of hysteresis; when none is left, the scale halves.
    After `window` steps without overflow the scale doubles and the hysteresis is full again. In the other precisions
    the scale stays 1, and a non-finite step is skipped and counted all the same.
    """

    config: LossScale
    enabled: bool
    scale: float = 1.0
    steps: int = 0
    last_overflow: int = -1
    budget: int = 0
    skipped: int = 0

    @property
    def moves(self) -> bool:
        """Whether the scale is found while training."""
        return self.enabled and self.config.static is None

    def __post_init__(self) -> None:
        if self.enabled:
            self.scale = self.config.static or 2.0**self.config.initial_power
        self.budget = self.config.hysteresis

    def update(self, overflow: bool) -> None:
        """Take note of one step. Raises FloatingPointError if the scale can't fall any further."""
        self.skipped += overflow
        if self.moves:
            if overflow:
                self._back_off()
            else:
                if self.config.refill:
                    self.budget = self.config.hysteresis
                good = self.steps - self.last_overflow - 1
                if good > 0 and good % self.config.window == 0:
                    self.budget = self.config.hysteresis
                    self.scale *= 2.0
        self.steps += 1

    def _back_off(self) -> None:
        if self.budget <= 1:
            if self.scale <= self.config.minimum:
                raise FloatingPointError(
                    f"fp16: gradients overflow at the smallest loss scale ({self.scale:g}), and every step would be "
                    "skipped from here on; use bf16 (dtype=bf16, in a DeepSpeed file bf16.enabled) or a lower "
                    "learning rate"
                )
            self.scale = max(self.scale / 2.0, self.config.minimum)
        else:
            self.budget -= 1
        self.last_overflow = self.steps

    def state(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "steps": self.steps,
            "last_overflow": self.last_overflow,
            "budget": self.budget,
            "skipped": self.skipped,
            "moves": self.moves,
        }

    def restore(self, state: dict[str, float]) -> None:
        """Go on from there; a scale is taken over where both precisions look for one."""
        self.skipped = int(state["skipped"])
        if self.moves and state.get("moves", state["scale"] != 1.0):
            self.scale, self.budget = float(state["scale"]), int(state["budget"])
            self.steps, self.last_overflow = int(state["steps"]), int(state["last_overflow"])
