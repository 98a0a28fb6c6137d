"""Search with the next layer: reflections between the constraints of the masks and those of the subspaces.

An input is a pair z = A p, y = V c with y = relu(z). The pair satisfies two constraints. Projecting onto either
constraint alone is easy:

- *subspaces*: z lies in span(A) and y in span(V); the projection is orthogonal;
- *masks*: for every neuron, either y = z ≥ 0 or y = 0 ≥ z; the projection takes the nearer case.

Descent on the distance gets stuck in local minima. The relaxed reflections (difference map, RRR)

    x ← x + β (P_mask(2 P_sub x - x) - P_sub x)

do not stop at a point that is not a solution. Both sets are cones, so x is kept at unit norm. The metric weights y by
α. This weight decides how many starts succeed. The search uses α = m/d, clipped to [2, 8], where d is the number of
dimensions that remain. With α = 1 far fewer starts succeed, and none at b=90, m=200 (docs/lab/notebook.md, section
"Reflections against descent").
"""

import torch

from spearpp.inversion.matches import outside
from spearpp.linalg import sphere
from spearpp.linalg.recording import repeat
from spearpp.types import Float, Tensor

BETA = 1.4
"""β. Measured: more starts succeed than with β = 1 at b=90, m=200 and at b=400, m=1000 (same table of the notebook)."""
ALPHAS = 2.0, 8.0
"""Smallest and largest α. Measured: smaller values found fewer inputs (same table). Larger values were not tried."""
BLOCK = 200
"""Reflections between two checks of how many starts have converged. Design choice: a check makes a GPU wait."""
CONVERGED = 0.02
"""Largest share of relu(z) outside span(V) for which a start counts as converged.

Design choice: far below the share at a random point, and far above rounding in float32.
"""


def reflect(
    span: Float[Tensor, "m d"],
    activations: Float[Tensor, "m e"],
    starts: Float[Tensor, "starts d"],
    most: int,
    *,
    alpha: float | None = None,
    beta: float = BETA,
) -> tuple[Float[Tensor, "starts d"], int]:
    """Reflect all starts until half of them have converged, or until the maximum number of reflections.

    Args:
        span: orthonormal basis of the z that remain.
        activations: orthonormal basis of the y that remain.
        starts: coordinates of z, unit vectors.
        most: maximum number of reflections.
        alpha: α. None: m/d, clipped to ``ALPHAS``.
        beta: β.

    Returns:
        The coordinates of z at the end, and the number of reflections.
    """
    alpha = min(max(span.shape[0] / span.shape[1], ALPHAS[0]), ALPHAS[1]) if alpha is None else alpha
    z = starts @ span.T
    y = alpha * z.clamp_min(0)

    def step() -> None:
        projected_z, projected_y = (z @ span) @ span.T, (y @ activations) @ activations.T
        reflected_z, reflected_y = 2 * projected_z - z, 2 * projected_y - y
        firing = ((reflected_z + alpha * reflected_y) / (1 + alpha**2)).clamp_min(0)
        silent = reflected_z.clamp_max(0)
        to_firing = (reflected_z - firing).square() + (reflected_y - alpha * firing).square()
        fires = to_firing < (reflected_z - silent).square() + reflected_y**2
        z.add_(beta * (torch.where(fires, firing, silent) - projected_z))
        y.add_(beta * (torch.where(fires, alpha * firing, 0.0) - projected_y))
        size = (z.square().sum(1, keepdim=True) + y.square().sum(1, keepdim=True)).sqrt_()
        z.div_(size)
        y.div_(size)

    done = 0
    while done < most:
        repeat(step, BLOCK, z.device)
        done += BLOCK
        ends = z @ span
        if bool((outside(ends @ span.T, activations) < CONVERGED).float().mean() >= 0.5):
            break
    return sphere.retract(ends), done
