"""Many small gradients factored at once: a GPU waits for launches where there is one at a time."""

from dataclasses import dataclass

import torch

from spearpp.lowrank.factors import Factors
from spearpp.lowrank.noise import not_zero, row_noise
from spearpp.lowrank.rank import numerical_rank
from spearpp.lowrank.triplets import COARSE, STEEP, by_eigenvectors
from spearpp.shapes import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Alike:
    """Gradients of one shape that turned out to have one rank."""

    which: Int[Tensor, "u"]
    """Their places among all that were given."""
    factors: Factors
    """Theirs, along a first dimension."""


def decompose_many(gradients: Float[Tensor, "all m columns"], epsilon: float) -> list[Alike]:
    """The factors of many small gradients, those of one rank together.

    By eigenvectors of Gram matrices (``triplets.by_gram``). Left out are gradients of which that cannot be vouched for,
    or whose rank cannot be read: ``decompose`` them one by one.
    """
    if epsilon < COARSE or min(gradients.shape[1:]) < 2:
        return []
    live, used = not_zero(gradients)
    u, s, vt = by_eigenvectors(gradients)
    norms, sizes = torch.linalg.vector_norm(gradients, dim=2), (live.sum(1), used.sum(1))
    spectra, shapes = s.cpu(), torch.stack(sizes, dim=1).tolist()
    ranks = [
        numerical_rank(spectrum[: min(shape)], (shape[0], shape[1]), epsilon)
        for spectrum, shape in zip(spectra, shapes, strict=True)
    ]
    found = []
    for b in sorted({rank for rank in ranks if rank is not None and 1 < rank < u.shape[2]}):
        same = [at for at, rank in enumerate(ranks) if rank == b and spectra[at, b - 1] >= STEEP * spectra[at, 0]]
        if same:
            at = torch.tensor(same, device=u.device)
            left = torch.where(live[at, :, None], u[at, :, :b], 0.0)
            right = s[at, :b, None] * vt[at, :b]
            squares = (gradients[at] - left @ right).square().sum(2)
            noise = row_noise((sizes[0][at], sizes[1][at]), left, s[at], squares, norms[at], epsilon)
            factors = Factors(
                left=left,
                right=right,
                singular_values=s[at, :b],
                spectrum=s[at],
                row_noise=torch.where(live[at], noise, 0.0),
                live=live[at],
                row_norms=norms[at],
                outside=squares.sum(1).sqrt(),
            )
            found.append(Alike(at, factors))
    return found
