"""Does this client update give the training batch away, exactly, and what would stop it?

``invert`` recovers the inputs of a Linear+ReLU layer from its gradients; ``simulate`` plays the
client; ``score`` compares the two.
"""

from spearpp import losses, rounding, search, simulate
from spearpp.errors import SpearError
from spearpp.invert import invert
from spearpp.metrics import Score, accuracy, score
from spearpp.normalisation import Normalisation
from spearpp.result import Inversion, Progress, Stats

__version__ = "0.1.0"

__all__ = [
    "Inversion",
    "Normalisation",
    "Progress",
    "Score",
    "SpearError",
    "Stats",
    "accuracy",
    "invert",
    "losses",
    "rounding",
    "score",
    "search",
    "simulate",
]
