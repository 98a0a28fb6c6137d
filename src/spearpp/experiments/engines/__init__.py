"""Engines measure cells: a pool of processes on this machine, or a Ray cluster."""

from spearpp.experiments.engines.base import Done, Engine, Failed, Outcome
from spearpp.experiments.engines.local import Local
from spearpp.experiments.engines.ray import Ray

__all__ = ["Done", "Engine", "Failed", "Local", "Outcome", "Ray"]
