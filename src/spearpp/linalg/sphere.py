"""The unit sphere S^{b-1}, for many points at once. Each row of a tensor is one point.

>>> import torch
>>> q = uniform(3, 5, torch.Generator().manual_seed(0))
>>> bool(torch.allclose(q.norm(dim=1), torch.ones(3)))
True
"""

import torch

from spearpp.types import Bool, Float, Tensor


def uniform(
    points: int,
    dimension: int,
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "points dimension"]:
    """Sample points uniformly from the sphere, as normalised Gaussian vectors.

    The points are sampled on the device of the generator and then moved to ``device``. A CPU generator therefore
    yields the same points on every device.
    """
    gaussian = torch.randn(points, dimension, generator=generator, dtype=dtype, device=generator.device)
    return retract(gaussian.to(device))


def norm(vectors: Float[Tensor, "*points b"]) -> Float[Tensor, "*points"]:
    """Return the norm of each vector, at least the smallest positive number, so that it can be a denominator."""
    return torch.linalg.vector_norm(vectors, dim=-1).clamp_min(torch.finfo(vectors.dtype).tiny)


def retract(vectors: Float[Tensor, "*points b"]) -> Float[Tensor, "*points b"]:
    """Project vectors to the nearest point of the sphere: v / ‖v‖. The zero vector stays zero."""
    return vectors / norm(vectors)[..., None]


def tangent(at: Float[Tensor, "*points b"], vectors: Float[Tensor, "*points b"]) -> Float[Tensor, "*points b"]:
    """Project vectors orthogonally onto the tangent space at q: v - (q·v) q."""
    return vectors - (at * vectors).sum(-1, keepdim=True) * at


def first_of_each(units: Float[Tensor, "k b"], cosine: float, *, signed: bool = False) -> Bool[Tensor, "k"]:
    """Return which unit vectors are the first of all that are parallel to them, which is to have a larger cosine.

    ``signed`` says whether opposite vectors are different.

    >>> import torch
    >>> first_of_each(torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0]]), 0.9).tolist()
    [True, True, False]
    """
    cosines = units @ units.T
    return ~((cosines if signed else cosines.abs()) > cosine).tril(-1).any(1)


def adam_step(
    points: Float[Tensor, "points b"],
    gradient: Float[Tensor, "points b"],
    momentum: Float[Tensor, "points b"],
    second: Float[Tensor, "points 1"],
    rate: float | Tensor,
    correction: float | Tensor,
    weights: tuple[float | Tensor, float | Tensor],
    epsilon: float,
) -> None:
    """Take one step of Riemannian Adam (Bécigneul and Ganea 2019) for every point, in place.

    With the Euclidean gradient e, the Riemannian gradient g = e - (q·e) q and the step number t:

        m ← m + (1-β₁) (g - m)
        v ← v + (1-β₂) (‖g‖² - v)         one number for each point
        q ← retract(q - rate · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + ε))
        m ← tangent(q, m)                 transported to the new point

    All PyTorch searches share this function. ``linalg.kernels.gated.blocks.adam_step`` is its Triton version.

    Args:
        points: unit vectors q, updated in place.
        gradient: Euclidean gradients e. The function overwrites them.
        momentum, second: m and v, updated in place.
        rate: the learning rate over 1-β₁ᵗ. A tensor of one entry is allowed, as for the two next arguments.
        correction: 1/(1-β₂ᵗ).
        weights: 1-β₁ and 1-β₂. With two zeros and a rate of zero, only rounding changes the points.
        epsilon: ε.

    >>> import torch
    >>> q, e = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 5.0]])
    >>> adam_step(q, e, torch.zeros(1, 2), torch.zeros(1, 1), 0.1 / (1 - 0.9), 1 / (1 - 0.999), (0.1, 0.001), 1e-8)
    >>> q / q[0, 1]
    tensor([[-0.1000,  1.0000]])
    """
    _to_tangent(points, gradient)
    momentum.lerp_(gradient, weights[0])
    second.lerp_(gradient.square().sum(1, keepdim=True), weights[1])
    points.sub_(momentum * (rate / (second * correction).sqrt_().add_(epsilon)))
    points.div_(torch.linalg.vector_norm(points, dim=1, keepdim=True))
    _to_tangent(points, momentum)


def _to_tangent(at: Float[Tensor, "points b"], vectors: Float[Tensor, "points b"]) -> None:
    """Apply ``tangent`` in place."""
    vectors.addcmul_(at, (at * vectors).sum(1, keepdim=True), value=-1)
