"""Search with a second witness: reflections between what the masks allow and what the subspaces allow.

An input is a pair z = A p, y = V c with y = relu(z). Of these two conditions each is easy on its own:

- *subspaces*: z in span(A) and y in span(V), by orthogonal projection;
- *masks*: for every neuron either y = z ≥ 0 or y = 0 ≥ z, whichever is nearer.

Descent on the distance gets stuck; the relaxed reflections (difference map, RRR)

    x ← x + β (P_mask(2 P_sub x - x) - P_sub x)

leave every point that is no solution. Both sets are cones, so x is kept at unit norm. y enters with
a weight α in the metric. It decides how many starts succeed: α = m/d for the d dimensions that are
left, within 2 and 8; with α = 1 hardly any do (``docs/research.md``).
"""

import torch

from spearpp.inversion.matches import outside
from spearpp.linalg import sphere
from spearpp.search.gated.recording import repeat
from spearpp.types import Float, Tensor

BETA = 1.4
ALPHAS = 2.0, 8.0
BLOCK = 200
"""Reflections between two looks at how many starts have arrived."""
ARRIVED = 0.02
"""Share of relu(z) outside span(V) below which a start counts as arrived."""


def reflect(
    span: Float[Tensor, "m d"],
    activations: Float[Tensor, "m e"],
    starts: Float[Tensor, "starts d"],
    most: int,
    *,
    alpha: float | None = None,
    beta: float = BETA,
) -> tuple[Float[Tensor, "starts d"], int]:
    """Reflections from all starts until half of them have arrived, or the most that are allowed.

    Args:
        span: orthonormal basis of the z that are left.
        activations: orthonormal basis of the y that are left.
        starts: coordinates of z, unit vectors.
        most: reflections of a start at most.
        alpha: α; None is m/d within ``ALPHAS``.
        beta: β.

    Returns:
        Coordinates of z at the end, and the reflections made.
    """
    alpha = min(max(span.shape[0] / span.shape[1], ALPHAS[0]), ALPHAS[1]) if alpha is None else alpha
    z = starts @ span.T
    y = alpha * z.clamp_min(0)

    def step() -> None:
        inner_z, inner_y = (z @ span) @ span.T, (y @ activations) @ activations.T
        far_z, far_y = 2 * inner_z - z, 2 * inner_y - y
        firing = ((far_z + alpha * far_y) / (1 + alpha**2)).clamp_min(0)
        silent = far_z.clamp_max(0)
        fires = (far_z - firing).square() + (far_y - alpha * firing).square() < (far_z - silent).square() + far_y**2
        z.add_(beta * (torch.where(fires, firing, silent) - inner_z))
        y.add_(beta * (torch.where(fires, alpha * firing, 0.0) - inner_y))
        size = (z.square().sum(1, keepdim=True) + y.square().sum(1, keepdim=True)).sqrt_()
        z.div_(size)
        y.div_(size)

    done = 0
    while done < most:
        repeat(step, BLOCK, z.device)
        done += BLOCK
        ends = z @ span
        if bool((outside(ends @ span.T, activations) < ARRIVED).float().mean() >= 0.5):
            break
    return sphere.retract(ends), done
