"""AdamW with decoupled decay (Loshchilov & Hutter, 2019, arXiv:1711.05101), and the learning rate by step."""

import math

import torch
from torch import nn

from engine.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up to the peak, then the schedule to the final ratio."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, config.total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    fall = done if config.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * done))
    return config.lr * (1.0 - fall * (1.0 - config.final_lr_ratio))


def build(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the module's trainable parameters; vectors and scalars (biases, norms) are not decayed.

    Moments are made at once, so that memory is known before the first step and a checkpoint can be read in place.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    for parameter in trainable:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
