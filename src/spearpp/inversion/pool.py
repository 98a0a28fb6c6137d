"""The pool of candidate directions: sparse enough, solved exactly, each there once up to sign."""

from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.inversion.tolerance import INDEPENDENT
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import distance_to_span, gather_weighted, smallest_eigenvector
from spearpp.types import Bool, Float, Int, Tensor

_REFITS = 3
_STEADY = 1e-3
"""Change of a weight below which solving again changes nothing."""
_COMPARED = 2048


@dataclass(frozen=True, eq=False)
class Pool:
    """The candidates S, in the order they were found."""

    directions: Float[Tensor, "candidates b"]
    """Unit vectors q."""
    zeros: Bool[Tensor, "candidates m"]
    """Which entries of L q are zero, by the noise rule."""

    def __len__(self) -> int:
        return self.directions.shape[0]

    def sparsest_first(self) -> Int[Tensor, "candidates"]:
        """Indices by falling number of zeros; equal ones in the order they were found."""
        return self.zeros.sum(1).argsort(descending=True, stable=True)

    @property
    def rank(self) -> int:
        """dim span(S)."""
        directions = self.directions.cpu()
        if len(self) <= directions.shape[1] and bool((distance_to_span(directions) > INDEPENDENT).all()):
            return len(self)  # as mostly
        return int(torch.linalg.matrix_rank(directions, rtol=INDEPENDENT)) if len(self) else 0


def empty_pool(problem: Problem) -> Pool:
    """A pool with nothing in it."""
    left = problem.factors.left
    return Pool(left.new_zeros(0, left.shape[1]), torch.zeros(0, left.shape[0], dtype=torch.bool, device=left.device))


def admit(pool: Pool, problem: Problem, proposed: Float[Tensor, "k b"], *, solved: bool = False) -> Pool:
    """The pool with those proposals added that are sparse enough and new.

    A proposal needs τ·m entries that look zero at a search's precision. It is then solved again in
    float64 for just those zeros (``refit``), unless it was ``solved`` already, must have τ·m zeros by the noise
    rule, and must not lie in the pool already, itself or its negative.
    """
    found = proposed
    if not solved:
        m = problem.factors.left.shape[0]
        found = sphere.retract(found.double())
        found = torch.cat([_sparse_enough(problem, part) for part in _parts(found, 24 * m)])
        found = refit(problem, drop_neighbours(found))
    values = found @ problem.factors.left.T
    zeros = problem.tolerance.zeros(values, found)
    enough = (_live_count(problem, zeros) >= problem.tolerance.least_zeros).nonzero()[:, 0]
    found, zeros = found[enough], zeros[enough]
    kept = _new_ones(pool, problem, found, zeros)
    if not len(kept):
        return pool
    return Pool(torch.cat([pool.directions, found[kept]]), torch.cat([pool.zeros, zeros[kept]]))


def refit(problem: Problem, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k b"]:
    """Solve each direction again for its own zeros.

    min Σ_k (w_k ℓ_k·q / σ_k)² on the sphere, over the rows k that look zero: the maximum-likelihood
    direction given those zeros, the exact one without noise. A row that only looked zero would
    spoil it, so w_k = min(1, t_k / |ℓ_k·q|) with t_k the largest entry that noise allows, and the
    weights are renewed until they stay, three times at most.
    """
    m, b = problem.factors.left.shape
    return torch.cat([_refit(problem, part) for part in _parts(directions, 24 * m * b)])


def _refit(problem: Problem, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k b"]:
    solved, moving = directions.clone(), torch.arange(len(directions), device=directions.device)
    last = directions.new_full((len(directions), len(problem.factors.live)), torch.inf)
    for _ in range(_REFITS):
        weight = weights(problem, solved[moving])
        changed = ((weight - last).abs() > _STEADY).any(1).nonzero()[:, 0]
        moving, last = moving[changed], weight[changed]
        if not len(moving):
            break
        solved[moving] = weighted(problem, last)
    return solved


def weights(problem: Problem, directions: Float[Tensor, "*u k b"]) -> Float[Tensor, "*u k m"]:
    """w_k of ``refit``; zero where L q does not look zero."""
    sizes = (directions @ problem.factors.left.mT).abs()
    bound = problem.tolerance.entry(directions)
    weight = (bound / sizes).clamp_max(1)
    looks = problem.factors.live[..., None, :] & (sizes <= problem.tolerance.at_search_precision(bound))
    return torch.nan_to_num(weight, nan=1.0) * looks


def weighted(problem: Problem, weight: Float[Tensor, "*u k m"]) -> Float[Tensor, "*u k b"]:
    """The unit q with the least Σ_k (w_k ℓ_k·q / σ_k)²."""
    rows = gather_weighted(problem.certain_rows, weight)
    return smallest_eigenvector(rows.mT @ rows)


def drop_neighbours(directions: Float[Tensor, "k b"]) -> Float[Tensor, "fewer b"]:
    """Drop most directions that equal another up to sign, in n log n.

    Many starts end at the same direction. Sorted by their component along a fixed vector, equal
    ones are neighbours; the few that are not are found later, when they are compared one by one.
    """
    k, b = directions.shape
    if k < 2:
        return directions
    probe = torch.cos(torch.arange(b, dtype=directions.dtype, device=directions.device) ** 2 + 0.5)
    along = directions @ probe
    directions = directions * torch.where(along < 0, -1.0, 1.0)[:, None]
    order = along.abs().argsort(stable=True)
    ordered = directions[order]
    apart = torch.linalg.vector_norm(ordered[1:] - ordered[:-1], dim=1) > 1e-4
    keep = torch.cat([apart.new_ones(1), apart])
    return directions[order[keep].sort().values]


def _new_ones(pool: Pool, problem: Problem, found: Tensor, zeros: Tensor) -> Int[Tensor, "kept"]:
    """Which of the found directions are neither in the pool nor a repetition; sparsest first."""
    order = zeros.sum(1).argsort(descending=True, stable=True)
    if len(pool) and len(found):
        order = order[~_same(problem, found[order], pool.directions).any(1)]
    kept = order[:0]
    for part in order.split(_COMPARED):
        if len(kept):
            part = part[~_same(problem, found[part], found[kept]).any(1)]
        repeated = _same(problem, found[part], found[part]).tril(-1).any(1)
        kept = torch.cat([kept, part[~repeated]])
    return kept


def _same(problem: Problem, these: Tensor, those: Tensor) -> Bool[Tensor, "these those"]:
    sine = (1 - (these @ those.T).square()).clamp_min(0).sqrt()
    return sine <= problem.tolerance.angle(those)


def _sparse_enough(problem: Problem, directions: Tensor) -> Tensor:
    near = problem.tolerance.look_zero(directions @ problem.factors.left.T, directions)
    return directions[_live_count(problem, near) >= problem.tolerance.least_zeros]


def _live_count(problem: Problem, zeros: Tensor) -> Int[Tensor, "k"]:
    return (zeros & problem.factors.live).sum(1)


def _parts(directions: Tensor, row_bytes: int) -> tuple[Tensor, ...]:
    return directions.split(chunk_size(directions.device, row_bytes))
