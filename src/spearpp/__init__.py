"""Does this client update give the training batch away, exactly, and what would stop it?

``audit`` takes a client's update and a model to a verdict; ``invert`` recovers the inputs of one Linear+ReLU
layer from its gradients, ``invert_many`` those of many at once; ``report`` writes what came of it for people and
programs; ``simulate`` plays the client; ``score`` compares with the truth.
"""

from spearpp import losses, report, rounding, search, simulate
from spearpp.about import __version__
from spearpp.audit import AuditResult, LayerAudit, Verdict, audit
from spearpp.consistency import Finding, check
from spearpp.errors import SpearError
from spearpp.invert import invert
from spearpp.layers import Layer, find_layers
from spearpp.many import invert_many
from spearpp.metrics import Score, accuracy, score
from spearpp.normalisation import Normalisation
from spearpp.replay import Replay
from spearpp.result import Inversion, Progress, Stats
from spearpp.update import ClientUpdate

__all__ = [
    "AuditResult",
    "ClientUpdate",
    "Finding",
    "Inversion",
    "Layer",
    "LayerAudit",
    "Normalisation",
    "Progress",
    "Replay",
    "Score",
    "SpearError",
    "Stats",
    "Verdict",
    "__version__",
    "accuracy",
    "audit",
    "check",
    "find_layers",
    "invert",
    "invert_many",
    "losses",
    "report",
    "rounding",
    "score",
    "search",
    "simulate",
]
