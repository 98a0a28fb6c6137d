"""The gated objective: how well a pair (p, q) agrees with the zeros that p implies.

Neuron k is inactive for the input x̂ = Rᵀp exactly if a_k·p ≤ 0. Then ℓ_k·q = 0 holds for the direction q of this input.
The objective therefore weights (gates) the rows by p, and minimises over q under the biorthogonality q·p = 1. The
small number ``ridge`` makes M invertible:

    ρ_k(p) = relu(-a_k·p)², scaled to sum to m
    M(p)   = Σ_k ρ_k ℓ_k ℓ_kᵀ + ridge · I
    f(p)   = min { qᵀ M q : q·p = 1 } = 1 / (pᵀ M⁻¹ p),      attained at q = f M⁻¹ p

f is near zero at every true p_i. With W = Σ_k relu(-a_k·p)², the gradient only needs q:

    ∇f = Σ_k -2 relu(-a_k·p) (m (ℓ_k·q)² - qᵀ(M - ridge · I)q) / W · a_k - 2 f q
"""

from dataclasses import dataclass

import torch

from spearpp.linalg.kernels.gated import for_rows
from spearpp.types import Float, Tensor


@dataclass(frozen=True)
class Gates:
    """A problem restricted to p = N v, orthogonal to the directions found so far, in the precision of the search."""

    rows: Float[Tensor, "m b"]
    """ℓ_k of the neurons that have a gradient."""
    gates: Float[Tensor, "m d"]
    """Nᵀa_k, scaled so that the entries of all a_k have mean square 1."""
    basis: Float[Tensor, "b d"]
    """N: orthonormal basis of the complement of the directions found, in the coordinates of the rows."""


class Objective:
    """f, q and the parts of ∇ log f at all points, the unit vectors v, in preallocated tensors.

    The class never forms M. It solves M u = p by conjugate gradients that start at the previous solution. An iteration
    takes two thin matrix products for all starts together. ``evaluate`` reads the current values of the points.
    """

    def __init__(self, gates: Gates, points: Float[Tensor, "starts d"], *, ridge: float, iterations: int) -> None:
        (m, b), (starts, d) = gates.rows.shape, points.shape
        self.gates, self.points, self.ridge, self.iterations = gates, points, ridge, iterations
        self.kernels = for_rows(points, max(m, b, d))
        self._transposed = gates.rows.T, gates.gates.T, gates.basis.T
        self.solution = points @ gates.basis.T
        """u = M⁻¹ p. The next evaluation starts from this solution."""
        self.direction = torch.empty_like(self.solution)
        """q."""
        self.value = points.new_empty(starts, 1)
        """f."""
        self.through_gates, self.through_basis = torch.empty_like(points), torch.empty_like(points)
        """∇ log f = through_gates / f - 2 through_basis."""
        self._p, self._residual, self._search, self._applied = (torch.empty_like(self.solution) for _ in range(4))
        self._inactivity, self._weight, self._image = (points.new_empty(starts, m) for _ in range(3))
        self._total, self._size = torch.empty_like(self.value), torch.empty_like(self.value)

    def evaluate(self) -> None:
        """Compute f, q and the parts of ∇ log f at the current points."""
        gates, kernels, (rows, gate_columns, basis) = self.gates, self.kernels, self._transposed
        torch.mm(self.points, basis, out=self._p)
        torch.mm(self.points, gate_columns, out=self._inactivity)
        kernels.gate(self._inactivity, self._weight, self._total)
        self._apply(self.solution)
        kernels.begin(self._p, self._applied, self._residual, self._search, self._size)
        for _ in range(self.iterations):
            self._apply(self._search)
            kernels.advance(self._search, self._applied, self.solution, self._residual, self._size)
        kernels.direct(self._p, self.solution, self.value, self.direction)
        torch.mm(self.direction, rows, out=self._image)
        kernels.pull(self._inactivity, self._weight, self._total, self._image)
        torch.mm(self._image, gates.gates, out=self.through_gates)
        torch.mm(self.direction, gates.basis, out=self.through_basis)

    def _apply(self, vectors: Float[Tensor, "starts b"]) -> None:
        """Write M v of each start to ``_applied``."""
        torch.mm(vectors, self._transposed[0], out=self._image)
        self._image.mul_(self._weight)
        torch.addmm(vectors, self._image, self.gates.rows, beta=self.ridge, out=self._applied)
