"""The pool of candidate directions.

Every direction q in the pool makes L q sparse, is solved in float64 for its own zeros, and occurs once up to sign.
"""

from dataclasses import dataclass

import torch

from spearpp.inversion.problem import Problem
from spearpp.inversion.tolerance import MIN_INDEPENDENT_DISTANCE
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import distance_to_span, gather_weighted, smallest_eigenvector
from spearpp.linalg.time_limit import check_time
from spearpp.types import Bool, Float, Int, Tensor

_REFITS = 3
"""Largest number of times that a direction is solved again for its zeros. Design choice: a limit on the cost."""
_WEIGHT_CHANGE = 1e-3
"""Change of a weight below which a direction is not solved again. Design choice: such a change turns the direction by
about a thousandth of what noise turns it."""
_NEIGHBOUR_DISTANCE = 1e-4
"""Distance below which neighbouring directions are duplicates before they are refit. Design choice: far below the
distance between different samples. Duplicates above it are found after the refit, with the noise as threshold."""


@dataclass(frozen=True, eq=False)
class Pool:
    """The candidate directions, in the order in which they were found."""

    directions: Float[Tensor, "candidates b"]
    """Unit vectors q, one row for each candidate."""
    zeros: Bool[Tensor, "candidates m"]
    """Which entries of L q are zero up to noise (``Tolerance.zeros``)."""

    def __len__(self) -> int:
        return self.directions.shape[0]

    def sparsest_first(self) -> Int[Tensor, "candidates"]:
        """Return the indices of all candidates, the one with the most zeros first. Ties keep their order."""
        return self.zeros.sum(1).argsort(descending=True, stable=True)

    @property
    def rank(self) -> int:
        """Dimension of the span of all candidates."""
        directions = self.directions.cpu()
        if len(self) <= directions.shape[1] and bool((distance_to_span(directions) > MIN_INDEPENDENT_DISTANCE).all()):
            return len(self)  # The usual case: all candidates are independent.
        return int(torch.linalg.matrix_rank(directions, rtol=MIN_INDEPENDENT_DISTANCE)) if len(self) else 0


def empty_pool(problem: Problem) -> Pool:
    """Return a pool without candidates."""
    left = problem.factors.left
    return Pool(left.new_zeros(0, left.shape[1]), torch.zeros(0, left.shape[0], dtype=torch.bool, device=left.device))


def admit(pool: Pool, problem: Problem, proposed: Float[Tensor, "k b"], *, solved: bool = False) -> Pool:
    """Return the pool with those proposed directions added that are sparse enough and new.

    A proposed direction is added if at least τ·m entries of L q look zero at the precision of a search, if at least τ·m
    entries are zero up to noise after the direction has been solved again in float64 (``refit``), and if neither the
    direction nor its negative is in the pool. ``solved`` says that the directions are unit vectors that ``refit`` has
    already solved.
    """
    if not len(proposed):
        return pool
    left, tolerance, live = problem.factors.left, problem.tolerance, problem.factors.live
    found = proposed
    if not solved:
        found = sphere.retract(found.double())
        chunks = found.split(chunk_size(found.device, 24 * len(left)))
        enough = [(tolerance.look_zero(q @ left.T, q) & live).sum(1) >= tolerance.least_zeros for q in chunks]
        found = refit(problem, drop_neighbours(found[torch.cat(enough)]))
    zeros = problem.zeros(found)
    sparse = ((zeros & live).sum(1) >= tolerance.least_zeros).nonzero()[:, 0]
    found, zeros = found[sparse], zeros[sparse]
    new = _new_directions(pool, problem, found, zeros)
    if not len(new):
        return pool
    return Pool(torch.cat([pool.directions, found[new]]), torch.cat([pool.zeros, zeros[new]]))


def refit(problem: Problem, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k b"]:
    """Solve each direction again for its own zeros.

    Minimise Σ_k (w_k ℓ_k·q / σ_k)² over unit vectors q, where k runs over the rows in which the given direction looks
    zero. The solution is the maximum-likelihood direction given these zeros, and the exact direction if there is no
    noise. A row that looks zero but is not would falsify the solution. Therefore w_k = min(1, t_k / |ℓ_k·q|), where t_k
    is the largest entry that noise explains. The weights are computed again until they no longer change, at most three
    times.
    """
    chunks = directions.split(chunk_size(directions.device, 24 * problem.factors.left.numel()))
    return torch.cat([_refit(problem, chunk) for chunk in chunks])


def _refit(problem: Problem, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k b"]:
    solved, active = directions.clone(), torch.arange(len(directions), device=directions.device)
    last = directions.new_full((len(directions), len(problem.factors.live)), torch.inf)
    for _ in range(_REFITS):
        check_time()
        weight = _zero_weights(problem, solved[active])
        changed = ((weight - last).abs() > _WEIGHT_CHANGE).any(1).nonzero()[:, 0]
        active, last = active[changed], weight[changed]
        if not len(active):
            break
        solved[active] = _solve_weighted(problem, last)
    return solved


def _zero_weights(problem: Problem, directions: Float[Tensor, "k b"]) -> Float[Tensor, "k m"]:
    """Return the weights w_k of ``refit``; zero where L q does not look zero."""
    sizes = (directions @ problem.factors.left.T).abs()
    bound = problem.tolerance.entry(directions)
    weight = (bound / sizes).clamp_max(1)
    looks_zero = problem.factors.live & (sizes <= problem.tolerance.at_search_precision(bound))
    return torch.nan_to_num(weight, nan=1.0) * looks_zero


def _solve_weighted(problem: Problem, weight: Float[Tensor, "k m"]) -> Float[Tensor, "k b"]:
    """Return the unit vector q that minimises Σ_k (w_k ℓ_k·q / σ_k)², for each row of weights."""
    rows = gather_weighted(problem.rows_per_noise, weight)
    return smallest_eigenvector(rows.mT @ rows)


def drop_neighbours(directions: Float[Tensor, "k b"]) -> Float[Tensor, "fewer b"]:
    """Drop most directions that equal another one up to sign, in O(k log k) time.

    Many starts of a search end at the same direction. The directions are sorted by their component along a fixed
    vector, so that equal directions become neighbours. ``admit`` later compares all pairs and drops the few duplicates
    that were not neighbours.
    """
    k, b = directions.shape
    if k < 2:
        return directions
    probe = torch.cos(torch.arange(b, dtype=directions.dtype, device=directions.device) ** 2 + 0.5)
    along = directions @ probe
    directions = directions * torch.where(along < 0, -1.0, 1.0)[:, None]
    order = along.abs().argsort(stable=True)
    ordered = directions[order]
    different = torch.linalg.vector_norm(ordered[1:] - ordered[:-1], dim=1) > _NEIGHBOUR_DISTANCE
    keep = torch.cat([different.new_ones(1), different])
    return directions[order[keep].sort().values]


def _new_directions(pool: Pool, problem: Problem, found: Tensor, zeros: Tensor) -> Int[Tensor, "new"]:
    """Return the indices of the found directions that are not in the pool, each direction once, sparsest first."""
    order = zeros.sum(1).argsort(descending=True, stable=True)
    if len(pool) and len(found):
        order = order[~_same(problem, found[order], pool.directions).any(1)]
    new = order[:0]
    for chunk in order.split(chunk_size(found.device, 8 * max(1, len(order)))):
        if len(new):
            chunk = chunk[~_same(problem, found[chunk], found[new]).any(1)]
        repeated = _same(problem, found[chunk], found[chunk]).tril(-1).any(1)
        new = torch.cat([new, chunk[~repeated]])
    return new


def _same(problem: Problem, these: Tensor, those: Tensor) -> Bool[Tensor, "these those"]:
    """Return which pairs of directions are the same up to sign and noise."""
    sine = (1 - (these @ those.T).square()).clamp_min(0).sqrt()
    return sine <= problem.tolerance.angle(those)
