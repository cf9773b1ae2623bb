"""How long a step will take, from a short probe of this device and what a setting makes it do."""

from engine.planning.probe import Probe, probe
from engine.planning.seconds import Pace, step_seconds

__all__ = ["Pace", "Probe", "probe", "step_seconds"]
