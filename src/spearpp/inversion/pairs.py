"""Inputs known together with their directions: they can be taken out of a problem on both sides."""

from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.linalg.nullspace import complement
from spearpp.types import Bool, Float, Tensor

ILL = 1e6
"""Condition of the products q_i·p_j, which should be near 1 and 0, from which pairs are not believed."""
DIFFERENT = 0.01
"""Share of the neurons on which p and L q may differ: a faint sample beside the one moves p a little."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Inputs with their directions, biorthogonal: q_i·p_j is 1 for i = j and else 0."""

    points: Float[Tensor, "k b"]
    """p: x̂ = Rᵀp up to scale."""
    directions: Float[Tensor, "k b"]
    """q: d = L q up to scale."""

    def __len__(self) -> int:
        return len(self.points)

    def join(self, points: Float[Tensor, "new b"], directions: Float[Tensor, "new b"]) -> "Pairs":
        """These and the new ones. What of a new input was hidden in the point of another is taken out of it.

        None are added where that is not possible: then some of them are wrong.
        """
        points, directions = torch.cat([self.points, points]), torch.cat([self.directions, directions])
        products = points @ directions.T
        solved, failed = torch.linalg.solve_ex(products, points)
        if bool(failed) or not bool(torch.linalg.cond(products) <= ILL):
            return self
        return Pairs(solved, directions)

    @property
    def apart(self) -> Float[Tensor, "b d"]:
        """An orthonormal basis of what is orthogonal to every p here, where every other q must lie."""
        return complement(self.points)

    def rest(self, rows: Float[Tensor, "m b"]) -> Float[Tensor, "m b"]:
        """L (I - Σ q pᵀ): rows without these inputs."""
        return rows - (rows @ self.directions.T) @ self.points


def no_pairs(problem: Problem) -> Pairs:
    """Nothing known yet."""
    none = problem.factors.left.new_zeros(0, problem.batch_size)
    return Pairs(none, none)


def fits(problem: Problem, points: Float[Tensor, "k b"], zeros: Bool[Tensor, "k m"]) -> Bool[Tensor, "k"]:
    """Whether each L q is zero just where p is silent, over the neurons with a gradient."""
    live = problem.factors.live
    silent = points @ problem.preactivations.T <= 0
    return ((zeros != silent) & live).sum(1) <= DIFFERENT * live.sum()
