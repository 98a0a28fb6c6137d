"""What a gradient is factored into."""

from dataclasses import dataclass
from functools import cached_property

import torch

from spearpp.types import Bool, Float, Tensor


@dataclass(frozen=True)
class Factors:
    """Ĝ ≈ L R with the noise that was left over; or those of several layers alike, along leading dimensions ``*u``."""

    left: Float[Tensor, "*u m b"]
    """L = U_b; rows of neurons whose gradient is zero are zero."""
    right: Float[Tensor, "*u b columns"]
    """R = Σ_b V_bᵀ."""
    singular_values: Float[Tensor, "*u b"]
    """The diagonal of Σ_b."""
    spectrum: Float[Tensor, "*u r"]
    """All singular values of Ĝ without its zero rows and columns; of a large matrix whose noise is
    rounding, those beyond the first few hundred are given by their root mean square."""
    row_noise: Float[Tensor, "*u m"]
    """σ_k, the standard deviation of the noise in row k of Ĝ."""
    live: Bool[Tensor, "*u m"]
    """Neurons with a gradient; the others fired for no sample and say nothing."""
    row_norms: Float[Tensor, "*u m"]
    """‖Ĝ_k‖."""
    outside: Float[Tensor, "*u"]
    """‖Ĝ - L R‖: what the factors do not hold."""

    @property
    def batch_size(self) -> int:
        """b, the number of factors."""
        return self.left.shape[-1]

    def distance(self, columns: Float[Tensor, "*u m k"], points: Float[Tensor, "*u k b"]) -> Float[Tensor, "*u"]:
        """‖Ĝ - D X̂ᵀ‖ for columns D and inputs x̂ = Rᵀp.

        The rows of R are orthogonal and what lies outside the factors is orthogonal to L, so this is
        ‖(L - D P) Σ‖ and ‖Ĝ - L R‖ together: no pass over the gradient.
        """
        within = (self.left - columns @ points) * self.singular_values[..., None, :]
        return torch.hypot(torch.linalg.matrix_norm(within), self.outside)

    @cached_property
    def live_neurons(self) -> int:
        """The number of rows that carry information."""
        return int(self.live.sum())
