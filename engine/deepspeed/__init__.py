"""DeepSpeed configurations, read as they are (docs/deepspeed.md)."""

from engine.deepspeed.read import Choices, checked, notes, read

__all__ = ["Choices", "checked", "notes", "read"]
