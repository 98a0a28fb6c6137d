"""Searches, one module each, interchangeable in ``spearpp.invert``. ``Equations`` solves the equations of the whole
network; all others look for sparse directions of one layer.
"""

from spearpp.search.base import Proposals, Search
from spearpp.search.equations import Equations
from spearpp.search.gated import Gated
from spearpp.search.kernel_sampling import KernelSampling
from spearpp.search.projected_gradient import ProjectedGradient
from spearpp.search.riemannian_adam import RiemannianAdam
from spearpp.search.suggested import Suggested

__all__ = [
    "Equations",
    "Gated",
    "KernelSampling",
    "ProjectedGradient",
    "Proposals",
    "RiemannianAdam",
    "Search",
    "Suggested",
]
