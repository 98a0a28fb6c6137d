"""Search that solves the equations of the whole network, for any activation.

``spearpp.inversion.network`` derives the equations. They determine every sample on its own, so no sparsity is needed
and the activation may be any known function that is not linear.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from spearpp.errors import OptionError
from spearpp.inversion.problem import Problem
from spearpp.search.base import Proposals, Search
from spearpp.search.equations.rounds import run_rounds
from spearpp.types import Float, Tensor

__all__ = ["Equations"]


@dataclass(frozen=True)
class Equations(Search):
    """Solve the forward and backward equations of the network by Levenberg-Marquardt from random starts.

    The search needs the rest of the network: pass ``following`` to ``spearpp.invert``, or a model to ``spearpp.audit``.

    Args:
        starts: largest number of random starts.
        inputs: inputs of the layer, of shape (k, n), that another search found. The search first solves the equations
            from these inputs. They need not be exact.
    """

    starts: int = 100_000
    inputs: Float[Tensor, "k n"] | None = field(default=None, compare=False, repr=False)
    sparsity = None

    def __post_init__(self) -> None:
        if isinstance(self.starts, bool) or not isinstance(self.starts, int) or self.starts < 1:
            raise OptionError(f"Equations(starts={self.starts!r}): expected a whole number of at least 1")

    def propose(self, problem: Problem, generator: torch.Generator, deadline: float) -> Iterator[Proposals]:
        """Propose the samples that satisfy all equations, round by round."""
        if problem.network is None:
            raise OptionError("the search Equations needs the rest of the network: pass following=")
        taken = 0
        none = problem.factors.left.new_zeros(0, problem.batch_size)
        for found, starts, steps in run_rounds(problem, problem.network, generator, deadline, self.inputs):
            taken += starts
            yield Proposals(none, starts, steps, solutions=found)
            if taken >= self.starts:
                return
