"""Sharded training state on disk, through `torch.distributed.checkpoint`: whole or absent, for any world size."""

from engine.checkpoint.checkpointer import Checkpointer, complete
from engine.checkpoint.random_state import random_state, restore_random_state
from engine.checkpoint.sums import Damaged

__all__ = ["Checkpointer", "Damaged", "complete", "random_state", "restore_random_state"]
