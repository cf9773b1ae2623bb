"""A stage while it runs."""

from pipeline.run.stage_run import StageRun

__all__ = ["StageRun"]
