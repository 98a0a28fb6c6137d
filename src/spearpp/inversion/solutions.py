"""Inputs that a search found one by one: with their directions, or as solutions of the equations of a network."""

from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.linalg.nullspace import complement
from spearpp.types import Bool, Float, Int, Tensor

MAX_CONDITION = 1e6
"""Largest condition number of the matrix of products q_i·p_j of unit vectors, which is near the identity for right
pairs. Design choice: beyond it, points that are solved from these products would keep fewer than ten digits."""
MAX_CONFLICTS = 0.01
"""Largest share of neurons in which the activation pattern of p and the zeros of L q may differ. Design choice: a weak
sample in the same row of the gradient moves p slightly, which changes the sign of few pre-activations."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Points with their directions. They are biorthogonal: q_i·p_j is 1 for i = j and 0 otherwise."""

    points: Float[Tensor, "k b"]
    """p, with x̂ = Rᵀp up to scale."""
    directions: Float[Tensor, "k b"]
    """q, with d = L q up to scale."""

    def __len__(self) -> int:
        return len(self.points)

    def join(self, points: Float[Tensor, "new b"], directions: Float[Tensor, "new b"]) -> "Pairs":
        """Return these pairs together with new ones, with all points made biorthogonal to all directions.

        The point of one input may contain a share of another input that is found later. Making the points biorthogonal
        removes this share. If this is not possible, some of the new pairs are wrong, and no new pair is added.
        """
        points, directions = torch.cat([self.points, points]), torch.cat([self.directions, directions])
        products = points @ directions.T
        solved, failed = torch.linalg.solve_ex(products, points)
        if bool(failed) or not bool(torch.linalg.cond(products) <= MAX_CONDITION):
            return self
        return Pairs(solved, directions)

    @property
    def apart(self) -> Float[Tensor, "b d"]:
        """Orthonormal basis of the space orthogonal to every point. The directions of all other inputs lie in it."""
        return complement(self.points)

    def rest(self, rows: Float[Tensor, "m b"]) -> Float[Tensor, "m b"]:
        """Return L (I - Σ q pᵀ): the rows of L without the shares of these inputs."""
        return rows - (rows @ self.directions.T) @ self.points


def no_pairs(problem: Problem) -> Pairs:
    """Return an empty set of pairs."""
    none = problem.factors.left.new_zeros(0, problem.batch_size)
    return Pairs(none, none)


def pattern_agrees(problem: Problem, points: Float[Tensor, "k b"], zeros: Bool[Tensor, "k m"]) -> Bool[Tensor, "k"]:
    """Return for which inputs L q is zero exactly where the neuron is inactive, up to ``MAX_CONFLICTS`` of the neurons.

    Only neurons with a gradient are compared.
    """
    live = problem.factors.live
    inactive = points @ problem.preactivations.T <= 0
    return ((zeros != inactive) & live).sum(1) <= MAX_CONFLICTS * live.sum()


@dataclass(frozen=True, eq=False)
class Solutions:
    """Samples that satisfy the equations of the network, one row for each."""

    coordinates: Float[Tensor, "k b"]
    """p̄, with x̂ = V p̄ for the orthonormal columns of V."""
    labels: Int[Tensor, "k"]
    """The label of each sample; 0 if the loss is unknown."""
    directions: Float[Tensor, "k b"]
    """Unit vectors q, with d = L q up to scale."""

    def __len__(self) -> int:
        return self.coordinates.shape[0]


def no_solutions(problem: Problem) -> Solutions:
    """Return an empty set of solutions."""
    none = problem.factors.left.new_zeros(0, problem.batch_size)
    return Solutions(none, torch.zeros(0, dtype=torch.long, device=none.device), none)
