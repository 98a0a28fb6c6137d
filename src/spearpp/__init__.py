"""Find out whether a client's update in federated learning reveals its training samples.

These are all public names of the package. Every other module is the home of the types that these names return, or an
implementation detail.

===================  ==============================================================================================
``audit``            Audit a client's update: recover training samples and return a verdict.
``AuditResult``      The result of an audit, with methods to save and load it.
``Verdict``          LEAKS, NOT_FOUND or NOT_APPLICABLE.
``ClientUpdate``     What a client sent, from gradients, from weights or from files.
``find_layers``      List the layers of a model that an audit can invert.
``check``            Report what was done to an update, for example noise or compression, without a search.
``invert``           Recover the inputs of one Linear layer from its gradients.
``invert_many``      Recover the inputs of many layers at once.
``search``           Module: the searches that ``invert`` and ``audit`` accept, with their losses and roundings.
``score``            Compare recovered inputs with the true inputs.
``Normalisation``    The map from the [0, 1] scale to the inputs of a network.
``report``           Module: write, re-render and compare report folders.
``simulate``         Module: networks, data sets and clients for experiments.
``SpearError``       Base class of every error that the package raises.
===================  ==============================================================================================
"""

from spearpp import report, search, simulate
from spearpp.about import __version__ as __version__
from spearpp.auditing import AuditResult, Verdict, audit
from spearpp.auditing.checks import check
from spearpp.errors import SpearError
from spearpp.inversion.invert import invert
from spearpp.inversion.many import invert_many
from spearpp.metrics import score
from spearpp.model import find_layers
from spearpp.normalisation import Normalisation
from spearpp.update import ClientUpdate

__all__ = [
    "AuditResult",
    "ClientUpdate",
    "Normalisation",
    "SpearError",
    "Verdict",
    "audit",
    "check",
    "find_layers",
    "invert",
    "invert_many",
    "report",
    "score",
    "search",
    "simulate",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
