"""Factor many small gradients at once, because a GPU is not busy with one small gradient."""

from dataclasses import replace

import torch

from spearpp.inversion.factors.factors import Factors, not_zero, row_noise
from spearpp.inversion.factors.rank import ROUNDING, clear_ranks, numerical_rank
from spearpp.inversion.factors.triplets import COARSE, STEEP, Triplets, sketched_triplets
from spearpp.types import Float, Int, Tensor

SKETCHES = 32, 96
"""Number of columns of the first and of the second sketch. Design choice: 32 columns suffice for
batches of up to 24 samples, and the second sketch is computed only for gradients that need it."""
MARGIN = 8
"""Number of columns that a sketch must have beyond the rank. Design choice: Halko, Martinsson and Tropp (2011)
recommend 5 to 10 for a randomised range finder."""


def decompose_many(gradients: Float[Tensor, "all m columns"], epsilon: float) -> list[tuple[Int[Tensor, "u"], Factors]]:
    """Factor many small gradients at once. Return the indices and the stacked factors of those with the same rank.

    Each gradient is factored within a sketch of 32 columns, if the part of the gradient outside the sketch is no larger
    than rounding (``sketched_triplets``). Gradients whose rank is too large for this sketch are factored within a
    sketch of 96 columns. The result omits gradients whose rank is uncertain after that. ``decompose`` factors such
    gradients one by one. ``epsilon`` is the machine epsilon of the dtype in which the gradients were passed.
    """
    if epsilon < COARSE:
        return []
    live, used = not_zero(gradients)
    sizes, norms = (live.sum(1), used.sum(1)), torch.linalg.vector_norm(gradients, dim=2)
    small, remaining, found = min(gradients.shape[1:]), list(range(len(gradients))), []
    for k in [each for each in SKETCHES if 2 * each <= small] or [small]:
        tried = torch.tensor(remaining, device=gradients.device)
        u, s, vt, outside = sketched_triplets(gradients[tried], k)
        rounding = (ROUNDING * epsilon) ** 2 / 12 * norms[tried].square().sum(1)
        tail = (outside / max(1, small - k)).sqrt()[:, None].expand(-1, small - k)
        spectra, shapes = torch.cat([s, tail], dim=1).cpu(), torch.stack(sizes, dim=1)[tried].tolist()
        certain = torch.nonzero(outside <= rounding)[:, 0].tolist()
        for b, indices in _by_rank(spectra, shapes, certain, (gradients.shape[1], gradients.shape[2]), k, epsilon):
            at = torch.tensor(indices, device=gradients.device)
            factors = _factors(gradients, tried[at], (u[at], s[at], vt[at]), b, live, sizes, norms, epsilon)
            found.append((tried[at], replace(factors, spectrum=spectra[indices].to(s.device))))
        done = {i for which, _ in found for i in which.tolist()}
        remaining = [i for i in remaining if i not in done]
        if not remaining:
            break
    return found


def _by_rank(
    spectra: Float[Tensor, "u r"],
    shapes: list[list[int]],
    certain: list[int],
    full_shape: tuple[int, int],
    k: int,
    epsilon: float,
) -> list[tuple[int, list[int]]]:
    """Return each rank that a sketch of k columns contains with ``MARGIN``, and the indices of gradients of this rank.

    ``certain`` has the indices of the gradients without signal outside their sketch. ``shapes`` counts the rows and
    columns of each gradient that are not zero, and ``full_shape`` all of them.
    """
    ranks = clear_ranks(spectra, full_shape, epsilon)
    by_rank: dict[int, list[int]] = {}
    for i in certain:
        rows, columns = shapes[i]
        rank = ranks[i]
        if (rows, columns) != full_shape:
            rank = numerical_rank(spectra[i, : min(rows, columns)], (rows, columns), epsilon)
        if rank is not None and 1 < rank <= k - MARGIN and spectra[i, rank - 1] >= STEEP * spectra[i, 0]:
            by_rank.setdefault(rank, []).append(i)
    return sorted(by_rank.items())


def _factors(
    gradients: Tensor,
    at: Int[Tensor, "u"],
    triplets: Triplets,
    b: int,
    live: Tensor,
    sizes: tuple[Tensor, Tensor],
    norms: Tensor,
    epsilon: float,
) -> Factors:
    """Return the factors of the gradients with indices ``at``, which all have rank b, from their singular triplets."""
    u, s, vt = triplets
    left, right = torch.where(live[at, :, None], u[:, :, :b], 0.0), s[:, :b, None] * vt[:, :b]
    squares = (gradients[at] - left @ right).square().sum(2)
    noise = row_noise((sizes[0][at], sizes[1][at]), left, s, squares, norms[at], epsilon)
    return Factors(
        left=left,
        right=right,
        singular_values=s[:, :b],
        spectrum=s,
        row_noise=torch.where(live[at], noise, 0.0),
        live=live[at],
        row_norms=norms[at],
        outside=squares.sum(1).sqrt(),
    )
