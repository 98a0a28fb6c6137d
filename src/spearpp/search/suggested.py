"""A search that proposes inputs which are already known, so that a gradient can be asked whether it proves them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.inversion.solutions import Solutions
from spearpp.linalg import sphere
from spearpp.search.base import Proposals, Search
from spearpp.search.equations.directions import directions_of
from spearpp.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Suggested(Search):
    """Propose given inputs instead of searching.

    With x̂_i = V c_i for the orthonormal columns of V, the gradient is L Σ Vᵀ = D X̂ᵀ, so all b inputs together have
    the directions Q = Σ C⁻¹. Fewer inputs have no directions, unless the equations of the network give one to each.

    Args:
        inputs: the inputs.
        labels: their labels; any value where they are not known.
    """

    inputs: Float[Tensor, "k n"]
    labels: Int[Tensor, "k"]

    starts = 0
    sparsity = None

    def propose(self, problem: Problem, generator: torch.Generator, deadline: float) -> Iterator[Proposals]:
        """Propose all inputs in one round."""
        del generator, deadline
        factors = problem.factors
        inputs = self.inputs.to(factors.left)
        if problem.seen.has_bias:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        coordinates = inputs @ factors.right.T / factors.singular_values
        none = factors.left.new_zeros(0, problem.batch_size)
        if problem.network is not None:
            preactivations, labels = coordinates @ problem.coordinates_to_preactivations.T, self.labels.to(none.device)
            directions, known = directions_of(problem, problem.network, preactivations, labels)
            yield Proposals(none, 0, 0, solutions=Solutions(coordinates[known], labels[known], directions[known]))
        elif len(inputs) == problem.batch_size:
            inverse = torch.linalg.pinv(coordinates).T * factors.singular_values
            yield Proposals(sphere.retract(inverse), 0, 0)
