"""Many small gradients factored at once: a GPU waits for launches where there is one at a time."""

from dataclasses import dataclass, replace

import torch

from spearpp.inversion.factors.factors import Factors
from spearpp.inversion.factors.noise import not_zero, row_noise
from spearpp.inversion.factors.rank import ROUNDING, clear_ranks, numerical_rank
from spearpp.inversion.factors.triplets import COARSE, STEEP, Triplets, within
from spearpp.types import Float, Int, Tensor

SKETCHES = 32, 96
"""Columns of the first sketch, and of the second."""
SPARE = 8
"""Columns that a sketch must have beyond the rank."""


@dataclass(frozen=True, eq=False)
class SameRank:
    """Gradients of one shape that turned out to have one rank."""

    which: Int[Tensor, "u"]
    """Their places among all that were given."""
    factors: Factors
    """Theirs, along a first dimension."""


def decompose_many(gradients: Float[Tensor, "all m columns"], epsilon: float) -> list[SameRank]:
    """The factors of many small gradients, those of one rank together.

    Within a sketch of a few columns, where what is outside is no more than rounding (``triplets.within``); a larger one
    for those whose rank it does not hold. Left out are gradients of which neither can vouch for the rank:
    ``decompose`` them one by one.
    """
    if epsilon < COARSE:
        return []
    live, used = not_zero(gradients)
    sizes, norms = (live.sum(1), used.sum(1)), torch.linalg.vector_norm(gradients, dim=2)
    small, left, found = min(gradients.shape[1:]), list(range(len(gradients))), []
    for k in [each for each in SKETCHES if 2 * each <= small] or [small]:
        some = torch.tensor(left, device=gradients.device)
        u, s, vt, outside = within(gradients[some], k)
        rounding = (ROUNDING * epsilon) ** 2 / 12 * norms[some].square().sum(1)
        spread = (outside / max(1, small - k)).sqrt()[:, None].expand(-1, small - k)
        spectra, shapes = torch.cat([s, spread], dim=1).cpu(), torch.stack(sizes, dim=1)[some].tolist()
        certain = torch.nonzero(outside <= rounding)[:, 0].tolist()
        for b, places in _by_rank(spectra, shapes, certain, (gradients.shape[1], gradients.shape[2]), k, epsilon):
            at = torch.tensor(places, device=gradients.device)
            factors = _factors(gradients, some[at], (u[at], s[at], vt[at]), b, live, sizes, norms, epsilon)
            found.append(SameRank(some[at], replace(factors, spectrum=spectra[places].to(s.device))))
        done = {i for alike in found for i in alike.which.tolist()}
        left = [i for i in left if i not in done]
        if not left:
            break
    return found


def _by_rank(
    spectra: Float[Tensor, "u r"],
    shapes: list[list[int]],
    certain: list[int],
    largest: tuple[int, int],
    k: int,
    epsilon: float,
) -> list[tuple[int, list[int]]]:
    """Each rank that a sketch of k columns holds with some to spare, and which of the certain matrices have it."""
    ranks = clear_ranks(spectra, largest, epsilon)
    told: dict[int, list[int]] = {}
    for i in certain:
        rows, columns = shapes[i]
        rank = ranks[i]
        if (rows, columns) != largest:
            rank = numerical_rank(spectra[i, : min(rows, columns)], (rows, columns), epsilon)
        if rank is not None and 1 < rank <= k - SPARE and spectra[i, rank - 1] >= STEEP * spectra[i, 0]:
            told.setdefault(rank, []).append(i)
    return sorted(told.items())


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
