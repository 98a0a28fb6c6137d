"""The whole descent in PyTorch: what the fused kernel does, step by step."""

import torch

from spearpp.types import Float, Tensor

BITS = 11
"""Of a factor in rough products: what float16 and TF32 hold."""


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
    """Steps of Riemannian Adam on φ(L q), one for each row of ``schedule``; points and moments move in place.

    Args:
        rows: L.
        points: unit q, one a row.
        momentum: m.
        second: v.
        schedule: for every step the rate over 1-β₁ᵗ and 1/(1-β₂ᵗ).
        width: μ of the slope h'(y) = tanh(y/μ); 0 for its limit, the sign.
        betas: β₁ and β₂.
        epsilon: ε.
        fine: whether products are as exact as float32; otherwise their factors have ``BITS`` bits.
    """
    seen = rows if fine else rough(rows)
    for rate, correction in schedule.unbind():
        y = (points if fine else rough(points)) @ seen.T
        slope = torch.tanh(y / width) if width else torch.sign(y)
        gradient = (slope if fine else rough(slope)) @ seen
        gradient.addcmul_(points, (points * gradient).sum(1, keepdim=True), value=-1)
        momentum.lerp_(gradient, 1 - betas[0])
        second.mul_(betas[1]).add_(gradient.square().sum(1, keepdim=True), alpha=1 - betas[1])
        points.sub_(momentum * (rate / (second * correction).sqrt_().add_(epsilon)))
        points.div_(torch.linalg.vector_norm(points, dim=1, keepdim=True))
        momentum.addcmul_(points, (points * momentum).sum(1, keepdim=True), value=-1)


def rough(values: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
    """The nearest numbers of ``BITS`` bits."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.round(mantissa * 2**BITS), exponent - BITS)
