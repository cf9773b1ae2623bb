"""Tiers: fp32 states of the optimizer on the host or in files, parameter shards in files."""

from engine.offload.optimizer import OffloadedOptimizer, full_precision

__all__ = ["OffloadedOptimizer", "full_precision"]
