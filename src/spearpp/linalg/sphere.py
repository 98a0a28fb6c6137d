"""The unit sphere S^{b-1}, for many points at once: one point a row.

>>> import torch
>>> q = uniform(3, 5, torch.Generator().manual_seed(0))
>>> bool(torch.allclose(q.norm(dim=1), torch.ones(3)))
True
"""

import torch

from spearpp.types import Float, Tensor


def uniform(
    points: int,
    dimension: int,
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "points dimension"]:
    """Points drawn uniformly: normalised Gaussian vectors.

    They are drawn on the generator's device and then moved, so a CPU generator gives the same
    points wherever the search runs.
    """
    drawn = torch.randn(points, dimension, generator=generator, dtype=dtype, device=generator.device)
    return retract(drawn.to(device))


def retract(vectors: Float[Tensor, "*points b"]) -> Float[Tensor, "*points b"]:
    """The nearest point of the sphere: v / ‖v‖. The zero vector stays where it is."""
    norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / norm.clamp_min(torch.finfo(vectors.dtype).tiny)


def tangent(at: Float[Tensor, "*points b"], vectors: Float[Tensor, "*points b"]) -> Float[Tensor, "*points b"]:
    """Orthogonal projection onto the tangent space at q: v - (q·v) q."""
    return vectors - (at * vectors).sum(-1, keepdim=True) * at
