"""Offload: fp32 optimizer states on the CPU or on NVMe, parameter shards on NVMe."""

from engine.offload.optimizer import OffloadedOptimizer
from engine.offload.parameters import NvmeParameters

__all__ = ["NvmeParameters", "OffloadedOptimizer"]
