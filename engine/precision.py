"""Mixed precision: casts of FSDP2, and the dynamic loss scale of fp16 (Micikevicius et al., 2018, arXiv:1710.03740).

Master parameters and optimizer states are fp32. Gradients are reduced in fp32 by default.
"""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from engine.config import LossScale, Precision

TORCH_DTYPE: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def policy(dtype: Precision, reduce: Precision = "fp32") -> MixedPrecisionPolicy:
    """Return the policy to compute in `dtype` and to reduce gradients in `reduce`."""
    if dtype == reduce == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=TORCH_DTYPE[dtype], reduce_dtype=TORCH_DTYPE[reduce])


@dataclass
class LossScaler:
    """The factor that keeps small fp16 gradients above zero.

    A step with a non-finite gradient is skipped and costs one unit of hysteresis. The scale halves when none is left.
    After `window` steps without overflow, the scale doubles and the hysteresis is restored. In other precisions the
    scale stays 1; non-finite steps are still skipped and counted.
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
        """Whether the scale adapts during training."""
        return self.enabled and self.config.static is None

    def __post_init__(self) -> None:
        if self.enabled:
            self.scale = self.config.static or 2.0**self.config.initial_power
        self.budget = self.config.hysteresis

    def update(self, overflow: bool) -> None:
        """Record one step. Raises FloatingPointError if the scale is at its minimum and would have to halve."""
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
                    f"fp16 gradients overflow at the smallest loss scale ({self.scale:g}), so every further step would "
                    "be skipped. Set dtype=bf16 (in a DeepSpeed file bf16.enabled), or a lower learning rate"
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
        """Restore a saved state. The scale is restored only if it adapts in both precisions."""
        self.skipped = int(state["skipped"])
        if self.moves and state.get("moves", state["scale"] != 1.0):
            self.scale, self.budget = float(state["scale"]), int(state["budget"])
            self.steps, self.last_overflow = int(state["steps"]), int(state["last_overflow"])
