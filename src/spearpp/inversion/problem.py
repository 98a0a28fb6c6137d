"""One layer, posed as the problem every search solves: find the q that make L q sparse."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from spearpp.inversion.factors import Factors, decompose
from spearpp.inversion.next_layer import FewOutputs, NextLayer
from spearpp.inversion.observation import Observation
from spearpp.inversion.tolerance import Tolerance, tolerance
from spearpp.types import Float, Tensor, to_device


@dataclass(frozen=True)
class Problem:
    """The factors of a gradient, what its layer's weights say about them, and what counts as zero.

    Or those of several layers of one shape and batch size, along a leading dimension: then the stages that say so
    (``*u`` in their types) do the same for each.
    """

    seen: Observation
    factors: Factors
    tolerance: Tolerance
    preactivations: Float[Tensor, "*u m b"]
    """A = Ŵ Rᵀ with rows a_k, so that the pre-activations of the input x̂ = Rᵀp are A p."""
    next_layer: NextLayer | None = None
    """The next layer's gradient, where there is one and it says something."""
    dropout: bool = False
    """Whether Dropout follows the ReLU: firing neurons may then have no gradient."""
    outputs: FewOutputs | None = None
    """What the weights of a next layer of few outputs say, where that layer is no witness."""

    @property
    def batch_size(self) -> int:
        """b."""
        return self.factors.batch_size

    def on(self, device: torch.device) -> "Problem":
        """The same with everything but the update itself on another device; its witness is left behind."""
        return replace(
            self,
            factors=to_device(self.factors, device),
            tolerance=to_device(self.tolerance, device),
            preactivations=self.preactivations.to(device),
            next_layer=None,
            outputs=None,
        )

    @cached_property
    def live_rows(self) -> Float[Tensor, "live b"]:
        """The rows of L that carry information: neurons with a gradient."""
        return self.factors.left[self.factors.live]

    @cached_property
    def certain_rows(self) -> Float[Tensor, "*u m b"]:
        """ℓ_k / σ_k, scaled so that the longest has length 1; zero for neurons without a gradient."""
        noise = torch.where(self.factors.live, self.factors.row_noise, 1.0)
        rows = self.factors.left / noise[..., None]
        longest = torch.linalg.vector_norm(rows, dim=-1).amax(-1)
        return rows / longest.clamp_min(torch.finfo(rows.dtype).tiny)[..., None, None]


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
