"""The strongest inputs of a batch, certified although weaker ones are missing or wrong.

A network that is sure of a sample sends little for it: strengths ‖d_i‖ ‖x̂_i‖ are orders of magnitude apart,
and the weakest samples sink into the rounding of the others. Their directions are then wrong or not found,
but that hardly touches the strong ones. Rely on k directions only. The points of least norm with
u_i·q_j = δ_ij differ from the true ones by n_i in the complement N of those directions, so

    x̂_i = Rᵀu_i + Rᵀn_i,        Rᵀn_i = -Σ_{j not relied on} (d_j·L u_i) x̂_j

and with ‖n_i‖ ≤ c ‖u_i‖ the error is at most c ‖RᵀN‖ ‖u_i‖, that of z_k at most c ‖Nᵀa_k‖ ‖u_i‖ (``reliance``).
The factor c was measured, not proved. It fails where a sample not relied on has nearly the signal of one that is: these
two are recovered as their weighted mean, as certificates say. The weaker the others, the less they leave open.
"""

from dataclasses import dataclass

import torch

from spearpp.certificate.masks import EXACT, Certificates, evidence
from spearpp.certificate.reliance import Reliance, rely
from spearpp.filtering import Selection
from spearpp.problem import Problem
from spearpp.shapes import Bool, Float, Int, Tensor

LOOKS = 64
"""Into so many steps a large batch is cut by strength."""


@dataclass(frozen=True, eq=False)
class Strongest:
    """The k inputs relied on, strongest first."""

    relied: Reliance
    zeros: Bool[Tensor, "k m"]
    certificates: Certificates


def strengths(problem: Problem, chosen: Selection) -> Float[Tensor, "found"]:
    """‖d_i‖ ‖x̂_i‖ = ‖Rᵀp_i‖ for unit q_i, of the directions found."""
    return torch.linalg.vector_norm(chosen.points[: chosen.found] @ problem.factors.right, dim=1)


def certify_strongest(problem: Problem, chosen: Selection) -> Strongest | None:
    """The most inputs, taken by strength, that are all consistent; None if there are none of which any is exact.

    The weakest is left out until the rest is consistent (more than one at a time of a large batch), or until what
    is left open makes every error too large: it only grows. Local steps (drift) would explain what a wrong
    direction does to the others, so they count for none here.
    """
    order = strengths(problem, chosen).argsort(descending=True, stable=True)
    most = len(order) - 1 if chosen.full else len(order)  # all b together were not consistent
    for k in range(most, 0, -max(1, problem.batch_size // LOOKS)):
        tried = _of(problem, chosen, order[:k])
        if not bool((tried.certificates.error <= EXACT).any()):
            return None
        if bool(tried.certificates.consistent.all()) and tried.certificates.drift == 0:
            return tried
    return None


def _of(problem: Problem, chosen: Selection, which: Int[Tensor, "k"]) -> Strongest:
    relied, zeros = rely(chosen.directions[which]), chosen.zeros[which]
    return Strongest(relied, zeros, evidence(problem, relied, zeros))
