"""Directions that are relied on, and what the others leave open."""

from dataclasses import dataclass

import torch

from spearpp.problem import Problem
from spearpp.shapes import Float, Tensor

LEVER = 1.0
"""‖n_i‖ / ‖u_i‖: how far a point reaches into what is left open, against its own length. In networks that know their
data nine in ten of 43,484 points reached 0.26, the farthest 1.1."""
FARTHEST = 10.0
"""The same, for the error that is stated: with contrast copies in the batch points reached 8."""


@dataclass(frozen=True, eq=False)
class Reliance:
    """k directions and their dual points; with k = b also those of several layers, along leading dimensions ``*u``."""

    directions: Float[Tensor, "*u k b"]
    """q_i, unit vectors."""
    points: Float[Tensor, "*u k b"]
    """u_i of least norm with u_i·q_j = 1 if i = j, else 0; the rows of Q⁻¹ where k = b."""
    open: Float[Tensor, "*u b f"]
    """N: orthonormal basis of the complement of the directions, empty where k = b."""

    def input_error(self, problem: Problem) -> Float[Tensor, "*u k"]:
        """10 ‖RᵀN‖ ‖u_i‖: how far Rᵀu_i may be off."""
        if not self.open.shape[-1]:
            return torch.zeros_like(self.points[..., 0])
        rest = torch.linalg.matrix_norm(self.open.mT @ problem.factors.right, 2)
        return FARTHEST * rest * torch.linalg.vector_norm(self.points, dim=-1)

    def preactivation_error(self, problem: Problem) -> Float[Tensor, "*u k m"]:
        """‖Nᵀa_k‖ ‖u_i‖: how far a_k·u_i may be off."""
        rest = torch.linalg.vector_norm(problem.preactivations @ self.open, dim=-1)
        return LEVER * torch.linalg.vector_norm(self.points, dim=-1)[..., None] * rest[..., None, :]

    def unexplained(self, problem: Problem) -> Float[Tensor, "*u"]:
        """‖NᵀR‖: how much of the gradient the others are, at least."""
        return torch.linalg.matrix_norm(self.open.mT @ problem.factors.right)


def rely(directions: Float[Tensor, "*u k b"], points: Float[Tensor, "*u k b"] | None = None) -> Reliance:
    """The duals of these directions, where they are not known, and their complement."""
    k, b = directions.shape[-2:]
    if k == b:
        points = torch.linalg.inv(directions.mT) if points is None else points
        return Reliance(directions, points, directions.mT[..., :0])
    basis, triangle = torch.linalg.qr(directions.mT, mode="complete")
    points = torch.linalg.solve_triangular(triangle[..., :k, :], basis[..., :k].mT, upper=True)
    return Reliance(directions, points, basis[..., k:])
