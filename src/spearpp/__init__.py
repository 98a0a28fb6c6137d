"""Does this client update give the training batch away, exactly, and what would stop it?

``audit`` takes a client's update and a model to a verdict; ``invert`` recovers the inputs of one Linear+ReLU
layer from its gradients, ``invert_many`` those of many at once; ``report`` writes what came of it for people and
programs; ``simulate`` plays the client; ``score`` compares with the truth.
"""

from spearpp import report, search, simulate
from spearpp.about import __version__
from spearpp.auditing import AuditResult, LayerAudit, Verdict, audit
from spearpp.auditing.checks import Finding, check
from spearpp.auditing.replay import Replay
from spearpp.errors import SpearError
from spearpp.inversion.invert import invert
from spearpp.inversion.many import invert_many
from spearpp.inversion.result import Inversion, Progress, Stats
from spearpp.metrics import Score, accuracy, score
from spearpp.model import Layer, find_layers
from spearpp.normalisation import Normalisation
from spearpp.search import losses, rounding
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
