"""Models as the stages use them: where they come from, the two modules trained, their engines, their export."""

from pipeline.models.build import EngineChoice, build_policy, build_scorer
from pipeline.models.export import export_policy, export_scorer
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import ModelSource, resolve

__all__ = [
    "EngineChoice",
    "ModelSource",
    "Policy",
    "Scorer",
    "build_policy",
    "build_scorer",
    "export_policy",
    "export_scorer",
    "resolve",
]
