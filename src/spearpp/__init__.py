"""Find out whether a client's update in federated learning reveals its training samples.

The table lists all public names of the package. The other modules hold the types that these names return, and
implementation details.

===================  ==============================================================================================
``audit``            Function: recover training samples from a client's update, and return a verdict.
``AuditResult``      Class: the result of ``audit``, with methods to save and load it.
``Verdict``          Enumeration: the verdicts LEAKS, NOT_FOUND and NOT_APPLICABLE.
``ClientUpdate``     Class: what a client sent, built from gradients, from weights or from a file.
``find_layers``      Function: list the Linear layers of a model, and say which of them an audit can invert.
``check``            Function: report what was done to an update, such as noise or compression, without a search.
``invert``           Function: recover the inputs of one Linear layer from its gradient.
``search``           Module: the searches that ``invert`` and ``audit`` accept, with their losses and roundings.
``score``            Function: compare recovered inputs with the true inputs.
``Normalisation``    Class: the map from values between 0 and 1 to the inputs of a network.
``report``           Module: functions that write, re-render and compare report folders.
``simulate``         Module: networks, data sets and clients for experiments.
``SpearError``       Class: the base class of all errors that the package raises.
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
