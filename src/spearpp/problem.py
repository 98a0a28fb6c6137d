"""One layer, posed as the problem every search solves: find the q that make L q sparse."""

from dataclasses import dataclass

from spearpp.lowrank import Factors, decompose
from spearpp.observation import Observation
from spearpp.shapes import Float, Tensor
from spearpp.tolerance import Tolerance, tolerance
from spearpp.witness import FewOutputs, Witness


@dataclass(frozen=True)
class Problem:
    """The factors of a gradient, what its layer's weights say about them, and what counts as zero."""

    seen: Observation
    factors: Factors
    tolerance: Tolerance
    preactivations: Float[Tensor, "m b"]
    """A = Ŵ Rᵀ with rows a_k, so that the pre-activations of the input x̂ = Rᵀp are A p."""
    witness: Witness | None = None
    """The next layer's gradient, where there is one and it says something."""
    outputs: FewOutputs | None = None
    """What the weights of a next layer of few outputs say, where that layer is no witness."""

    @property
    def batch_size(self) -> int:
        """b."""
        return self.factors.batch_size

    @property
    def live_rows(self) -> Float[Tensor, "live b"]:
        """The rows of L that carry information: neurons with a gradient."""
        return self.factors.left[self.factors.live]


def pose(seen: Observation, *, batch_size: int | None = None, sparsity: float | None = None) -> Problem:
    """Factor the gradient and derive from it what every stage needs.

    Raises:
        RankError: if the gradient's rank does not allow inversion.
    """
    factors = decompose(seen, batch_size)
    return Problem(
        seen=seen,
        factors=factors,
        tolerance=tolerance(seen, factors, sparsity),
        preactivations=seen.weight @ factors.right.T,
    )
