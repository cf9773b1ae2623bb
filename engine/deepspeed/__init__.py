"""DeepSpeed configurations, read as they are (docs/deepspeed.md)."""

from engine.deepspeed.read import Choices, open_file, read

__all__ = ["Choices", "open_file", "read"]
