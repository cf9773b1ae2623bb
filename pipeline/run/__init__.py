"""A stage while it runs."""

from pipeline.run.stage_run import StageRun, within_limits

__all__ = ["StageRun", "within_limits"]
