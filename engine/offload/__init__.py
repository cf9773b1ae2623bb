"""Tiers: fp32 states of the optimizer on the host or in files, parameter shards in files."""

from engine.offload.mapped import MappedShards
from engine.offload.optimizer import OffloadedOptimizer, full_precision
from engine.offload.together import together

__all__ = ["MappedShards", "OffloadedOptimizer", "full_precision", "together"]
