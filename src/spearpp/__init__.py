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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spearpp.about import __version__ as __version__

if TYPE_CHECKING:
    from spearpp import report, search, simulate
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
_HOMES = {
    "AuditResult": "auditing",
    "ClientUpdate": "update",
    "Normalisation": "normalisation",
    "SpearError": "errors",
    "Verdict": "auditing",
    "audit": "auditing",
    "check": "auditing.checks",
    "find_layers": "model",
    "invert": "inversion.invert",
    "invert_many": "inversion.many",
    "report": "report",
    "score": "metrics",
    "search": "search",
    "simulate": "simulate",
}
"""The module of each public name. It is imported when the name is first used, because PyTorch takes long to import."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spearpp' has no attribute {name!r}")
    module = import_module(f"spearpp.{_HOMES[name]}")
    value = module if _HOMES[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
