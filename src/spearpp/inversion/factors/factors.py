"""The factors of a gradient."""

from dataclasses import dataclass
from functools import cached_property

import torch

from spearpp.types import Bool, Float, Tensor


@dataclass(frozen=True)
class Factors:
    """Ĝ ≈ L R and the noise that remains.

    Several layers of one shape and batch size can be stacked along leading dimensions ``*u``.
    """

    left: Float[Tensor, "*u m b"]
    """L = U_b, with orthonormal columns. The rows of neurons without a gradient are zero."""
    right: Float[Tensor, "*u b columns"]
    """R = Σ_b V_bᵀ."""
    singular_values: Float[Tensor, "*u b"]
    """The diagonal of Σ_b."""
    spectrum: Float[Tensor, "*u r"]
    """All singular values of Ĝ without its zero rows and columns, largest first. If a large matrix was factored by a
    sketch, all values outside the sketch are replaced by their root mean square."""
    row_noise: Float[Tensor, "*u m"]
    """σ_k, the standard deviation of the noise in row k of Ĝ."""
    live: Bool[Tensor, "*u m"]
    """Which neurons have a gradient. The other neurons are inactive for every sample and contain no information."""
    row_norms: Float[Tensor, "*u m"]
    """‖Ĝ_k‖, the norm of each row of Ĝ."""
    outside: Float[Tensor, "*u"]
    """‖Ĝ - L R‖, the part of the gradient outside the factors."""

    @property
    def batch_size(self) -> int:
        """b, the number of singular triplets that the factors contain."""
        return self.left.shape[-1]

    def distance(self, columns: Float[Tensor, "*u m k"], points: Float[Tensor, "*u k b"]) -> Float[Tensor, "*u"]:
        """Return ‖Ĝ - D X̂ᵀ‖ for the columns of D and inputs x̂ = Rᵀp.

        The rows of R are orthogonal, and Ĝ - L R is orthogonal to L. The squared distance is therefore
        ‖(L - D P) Σ‖² + ‖Ĝ - L R‖², which needs no pass over the gradient.
        """
        inside = (self.left - columns @ points) * self.singular_values[..., None, :]
        return torch.hypot(torch.linalg.matrix_norm(inside), self.outside)

    @cached_property
    def live_neurons(self) -> int:
        """Number of neurons with a gradient."""
        return int(self.live.sum())
