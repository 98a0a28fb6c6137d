"""The gated objective: how well a single pair (p, q) explains its own zeros.

Neuron k is silent for the input x̂ = Rᵀp exactly when a_k·p ≤ 0, and then ℓ_k·q = 0 for that
input's direction q. So gate the rows by p and let q follow, under the biorthogonality q·p = 1:

    ρ_k(p) = relu(-a_k·p)², scaled to sum to m
    M(p)   = Σ_k ρ_k ℓ_k ℓ_kᵀ + ε I
    f(p)   = min { qᵀ M q : q·p = 1 } = 1 / (pᵀ M⁻¹ p),      attained at q = f M⁻¹ p

f is near zero at every true p_i. With W = Σ_k relu(-a_k·p)², its gradient needs no more than q:

    ∇f = Σ_k -2 relu(-a_k·p) (m (ℓ_k·q)² - qᵀ(M - εI)q) / W · a_k - 2 f q
"""

from dataclasses import dataclass

import torch

from spearpp.linalg.kernels.gated import for_rows
from spearpp.types import Float, Tensor


@dataclass(frozen=True)
class Gates:
    """A problem confined to p = N c: what is left after deflation, in the search's precision."""

    rows: Float[Tensor, "m b"]
    """ℓ_k, neurons with a gradient only."""
    gates: Float[Tensor, "m d"]
    """Nᵀa_k, scaled so that the a_k have mean square 1."""
    basis: Float[Tensor, "b d"]
    """N: the complement of the directions found, in the coordinates of the rows."""


class Objective:
    """f, q and the parts of ∇ log f at all points, in tensors that stay where they are.

    M is never formed: M u = p is solved by conjugate gradients from the last solution, two thin
    matrix products an iteration for all starts together.
    """

    def __init__(self, gates: Gates, points: Float[Tensor, "starts d"], *, epsilon: float, iterations: int) -> None:
        (m, b), (starts, d) = gates.rows.shape, points.shape
        self.gates, self.points, self.epsilon, self.iterations = gates, points, epsilon, iterations
        self.kernels = for_rows(points, max(m, b, d))
        self._across = gates.rows.T, gates.gates.T, gates.basis.T
        self.solution = points @ gates.basis.T
        """u = M⁻¹ p; the next evaluation starts from it."""
        self.direction = torch.empty_like(self.solution)
        """q."""
        self.value = points.new_empty(starts, 1)
        """f."""
        self.through_gates, self.through_basis = torch.empty_like(points), torch.empty_like(points)
        """∇ log f is the first over f, less twice the second."""
        self._p, self._residual, self._search, self._applied = (torch.empty_like(self.solution) for _ in range(4))
        self._silence, self._weight, self._image = (points.new_empty(starts, m) for _ in range(3))
        self._total, self._size = torch.empty_like(self.value), torch.empty_like(self.value)

    @property
    def gradient(self) -> Float[Tensor, "starts d"]:
        """∇ log f with respect to c, as of the last evaluation."""
        return self.through_gates / self.value - 2 * self.through_basis

    def evaluate(self) -> None:
        """At the points as they are now."""
        gates, kernels, (rows, across, basis) = self.gates, self.kernels, self._across
        torch.mm(self.points, basis, out=self._p)
        torch.mm(self.points, across, out=self._silence)
        kernels.gate(self._silence, self._weight, self._total)
        self._apply(self.solution)
        kernels.begin(self._p, self._applied, self._residual, self._search, self._size)
        for _ in range(self.iterations):
            self._apply(self._search)
            kernels.advance(self._search, self._applied, self.solution, self._residual, self._size)
        kernels.direct(self._p, self.solution, self.value, self.direction)
        torch.mm(self.direction, rows, out=self._image)
        kernels.pull(self._silence, self._weight, self._total, self._image)
        torch.mm(self._image, gates.gates, out=self.through_gates)
        torch.mm(self.direction, gates.basis, out=self.through_basis)

    def _apply(self, vectors: Float[Tensor, "starts b"]) -> None:
        """M v for each start, in ``_applied``."""
        torch.mm(vectors, self._across[0], out=self._image)
        self._image.mul_(self._weight)
        torch.addmm(vectors, self._image, self.gates.rows, beta=self.epsilon, out=self._applied)
