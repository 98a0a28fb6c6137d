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

from spearpp.shapes import Float, Tensor

_TINY = 1e-30


@dataclass(frozen=True)
class Gates:
    """A problem confined to p = N c: what is left after deflation, in the search's precision."""

    rows: Float[Tensor, "m b"]
    """ℓ_k, neurons with a gradient only."""
    gates: Float[Tensor, "m d"]
    """Nᵀa_k, scaled so that the a_k have mean square 1."""
    basis: Float[Tensor, "b d"]
    """N, with orthonormal columns: the complement of the directions found."""


def gated_objective(
    gates: Gates,
    points: Float[Tensor, "starts d"],
    solution: Float[Tensor, "starts b"],
    *,
    epsilon: float,
    iterations: int,
) -> tuple[Float[Tensor, "starts 1"], Float[Tensor, "starts b"], Float[Tensor, "starts d"], Float[Tensor, "starts b"]]:
    """Value, direction q, gradient of log f with respect to c, and M⁻¹p to start from next time.

    M is never formed: M u = p is solved by conjugate gradients from the last solution, two thin
    matrix products an iteration for all starts together.
    """
    m = gates.rows.shape[0]
    p = points @ gates.basis.T
    silence = (points @ gates.gates.T).neg_().clamp_min_(0)
    squares = silence.square()
    total = squares.sum(1, keepdim=True).clamp_min(_TINY)
    weight = squares * (m / total)
    solution = _conjugate_gradients(gates.rows, weight, epsilon, p, solution, iterations)
    value = (p * solution).sum(1, keepdim=True).clamp_min(_TINY).reciprocal()
    direction = value * solution
    image = (direction @ gates.rows.T).square_()
    mean = (weight * image).sum(1, keepdim=True) / m
    pull = silence * (image - mean) * (-2 * m / total)
    gradient = (pull @ gates.gates) / value - 2 * (direction @ gates.basis)
    return value, direction, gradient, solution


def _conjugate_gradients(
    rows: Tensor, weight: Tensor, epsilon: float, right: Tensor, start: Tensor, iterations: int
) -> Tensor:
    """Solve (Σ weight_k ℓ_k ℓ_kᵀ + ε I) u = right for each start, from ``start``."""

    def apply(vectors: Tensor) -> Tensor:
        return (weight * (vectors @ rows.T)) @ rows + epsilon * vectors

    residual = right - apply(start)
    search = residual
    size = residual.square().sum(1, keepdim=True)
    for _ in range(iterations):
        applied = apply(search)
        step = size / (search * applied).sum(1, keepdim=True).clamp_min(_TINY)
        start = start + step * search
        residual = residual - step * applied
        shrunk = residual.square().sum(1, keepdim=True)
        search = residual + (shrunk / size.clamp_min(_TINY)) * search
        size = shrunk
    return start
