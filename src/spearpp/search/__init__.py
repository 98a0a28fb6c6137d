"""Searches for sparse directions: one module each, interchangeable in ``spearpp.invert``."""

from spearpp.search.base import Proposals, Search
from spearpp.search.gated import Gated
from spearpp.search.kernel_sampling import KernelSampling
from spearpp.search.projected_gradient import ProjectedGradient
from spearpp.search.riemannian_adam import RiemannianAdam

__all__ = ["Gated", "KernelSampling", "ProjectedGradient", "Proposals", "RiemannianAdam", "Search"]
