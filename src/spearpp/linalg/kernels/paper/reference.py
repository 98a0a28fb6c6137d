"""The whole descent in PyTorch. The fused kernel computes the same."""

import torch

from spearpp.linalg import sphere
from spearpp.types import Float, Tensor

BITS = 11
"""Number of significant bits of a factor in rough products: the significand of float16 and of TF32."""


def descend(
    rows: Float[Tensor, "m b"],
    points: Float[Tensor, "starts b"],
    momentum: Float[Tensor, "starts b"],
    second: Float[Tensor, "starts 1"],
    schedule: Float[Tensor, "steps 2"],
    width: float,
    betas: tuple[float, float],
    epsilon: float,
    fine: bool,
) -> None:
    """Minimise φ(L q) by Riemannian Adam, one step for each row of ``schedule``. Points and moments change in place.

    Args:
        rows: L.
        points: unit vectors q, one per row.
        momentum: m.
        second: v.
        schedule: for every step the learning rate over 1-β₁ᵗ, and 1/(1-β₂ᵗ).
        width: μ of the derivative h'(y) = tanh(y/μ); 0 for its limit, sign(y).
        betas: β₁ and β₂.
        epsilon: ε.
        fine: whether products have the accuracy of float32; otherwise their factors are rounded to ``BITS`` bits.
    """
    left = rows if fine else rough(rows)
    weights = 1 - betas[0], 1 - betas[1]
    for rate, correction in schedule.unbind():
        y = (points if fine else rough(points)) @ left.T
        slope = torch.tanh(y / width) if width else torch.sign(y)
        gradient = (slope if fine else rough(slope)) @ left
        sphere.adam_step(points, gradient, momentum, second, rate, correction, weights, epsilon)


def rough(values: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
    """Round values to ``BITS`` significant bits."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.round(mantissa * 2**BITS), exponent - BITS)
