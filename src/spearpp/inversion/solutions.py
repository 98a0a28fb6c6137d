"""Points that solve the equations of a network, and their coordinates."""

from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.types import Float, Int, Tensor

__all__ = ["Solutions", "affine", "coordinates_of", "no_solutions"]


@dataclass(frozen=True, eq=False)
class Solutions:
    """Samples that satisfy the equations of the network, one row for each."""

    coordinates: Float[Tensor, "k b"]
    """p, with x̂ = V p for the orthonormal columns of V."""
    labels: Int[Tensor, "k"]
    """The label of each sample; 0 if the loss is unknown."""
    directions: Float[Tensor, "k b"]
    """Unit vectors q, with d = L q up to scale."""

    def __len__(self) -> int:
        return self.coordinates.shape[0]

    def join(self, other: "Solutions") -> "Solutions":
        """Return these samples followed by the other ones."""
        return Solutions(
            torch.cat([self.coordinates, other.coordinates]),
            torch.cat([self.labels, other.labels]),
            torch.cat([self.directions, other.directions]),
        )


def no_solutions(problem: Problem) -> Solutions:
    """Return an empty set of solutions."""
    none = problem.factors.left.new_zeros(0, problem.batch_size)
    return Solutions(none, torch.zeros(0, dtype=torch.long, device=none.device), none)


def coordinates_of(problem: Problem) -> tuple[Float[Tensor, "m b"], Float[Tensor, "b"] | None]:
    """Return A with z = A p, and the vector e with e·p = 1 for every sample; None for a layer without bias."""
    factors = problem.factors
    preactivations = problem.preactivations / factors.singular_values
    return preactivations, factors.right[:, -1] / factors.singular_values if problem.seen.has_bias else None


def affine(
    space: Float[Tensor, "b k"], one: Float[Tensor, "b"] | None
) -> tuple[Float[Tensor, "b"], Float[Tensor, "b u"]]:
    """Return origin and orthonormal basis of the points p in a space whose inputs end in 1: p = origin + basis · t.

    Args:
        space: orthonormal basis of the space.
        one: the vector e with e·p = 1; None for a layer without bias, whose points are not restricted.
    """
    if one is None:
        return torch.zeros_like(space[:, 0]), space
    end = space.T @ one
    frame = torch.eye(len(end), dtype=end.dtype, device=end.device)
    frame[:, 0] = end
    return space @ (end / (end @ end)), space @ torch.linalg.qr(frame)[0][:, 1:]
