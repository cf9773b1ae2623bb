"""Sharded training state on disk, through `torch.distributed.checkpoint`: complete or absent, for any world size."""

from engine.checkpoint.checkpointer import Checkpointer, complete, random_state, restore_random_state
from engine.checkpoint.storage import Damaged

__all__ = ["Checkpointer", "Damaged", "complete", "random_state", "restore_random_state"]
