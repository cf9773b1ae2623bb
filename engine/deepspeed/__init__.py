"""DeepSpeed configurations, read as they are (docs/reference/deepspeed.md)."""

from engine.deepspeed.read import Choices, checked, fields_over, notes, read

__all__ = ["Choices", "checked", "fields_over", "notes", "read"]
