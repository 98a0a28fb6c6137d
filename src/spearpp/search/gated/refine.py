"""Refinement: from the end point of a descent to an exact direction, in float64."""

import torch

from spearpp.inversion.pool import refit
from spearpp.inversion.problem import Problem
from spearpp.linalg import sphere
from spearpp.linalg.chunks import chunk_size
from spearpp.linalg.nullspace import gather_weighted, kernel_vectors, smallest_eigenvector, two_smallest_eigenvectors
from spearpp.linalg.time_limit import check_time
from spearpp.types import Bool, Float, Int, Tensor

DUPLICATE_COSINE = 0.9
"""Cosine above which two end points count as the same direction. Measured: no direction was lost, and different true
directions had a cosine of at most 0.61 (docs/lab/notebook.md, section "Speed"). If a direction is lost here, later
rounds can still find it."""
MIN_PROMISING_SHARE = 0.5
"""Minimum share of the inactive rows on which L q must be small for an end point to be refined. Design choice: near an
input, most of these rows are small at the end of a descent."""
MAX_SMALL_ENTRY = 0.1
"""Largest size of a small entry of L q, relative to the root mean square of L q. Design choice:
Gaussian entries are below it with a probability of 8 %, so half of the inactive rows are rarely below it by chance."""
MIN_ROWS_PER_UNKNOWN = 3.0
"""Minimum number of inactive rows per unknown for which the smallest rows alone are solved. Measured: with fewer rows,
concentration steps accept mixtures of similar samples (docs/lab/notebook.md, section "Speed")."""
TRIMMED_SHARES = (0.6, 0.8)
"""Shares of the inactive rows that the successive concentration steps solve. Measured: one or three steps found 19 and
20 inputs instead of 29 (docs/lab/notebook.md, section "Speed"). The shares are a design choice."""
MIN_SECOND_SINGULAR_VALUE = 0.1
"""Minimum second singular value of the solved rows. Below, the rows allow more than one direction. Measured: below this
value, mixtures of similar samples were accepted (docs/lab/notebook.md, section "Speed")."""
_REWEIGHTINGS = 12
"""Iterations of reweighted least squares. Measured: six find 25 to 31 inputs instead of 31 to 40 (same section)."""
_DELTA_FACTOR = 0.4
"""Factor by which δ shrinks in each reweighting. Design choice: 0.4¹² is 2e-5, so δ ends near the noise."""


def inactive_neurons(problem: Problem, points: Float[Tensor, "k b"]) -> Bool[Tensor, "k m"]:
    """Return which neurons with a gradient are inactive for x̂ = Rᵀp."""
    return (points @ problem.preactivations.T <= 0) & problem.factors.live


def promising(problem: Problem, points: Float[Tensor, "k b"], directions: Float[Tensor, "k b"]) -> Int[Tensor, "n"]:
    """Return the indices of the promising end points, the most promising first, without duplicates.

    An end point is promising if L q is below a tenth of its root mean square on at least half of the rows that are
    inactive for p. It is a duplicate if its direction is nearly parallel to that of a more promising end point.
    """
    left, unit = problem.factors.left, sphere.retract(directions)
    small = (unit @ left.T).abs() <= MAX_SMALL_ENTRY / len(left) ** 0.5
    inactive = inactive_neurons(problem, points)
    share = (small & inactive).sum(1) / inactive.sum(1).clamp_min(1)
    share, order = share.sort(descending=True, stable=True)
    order = order[share >= MIN_PROMISING_SHARE]
    return order[sphere.first_of_each(unit[order], DUPLICATE_COSINE)]


def refine(problem: Problem, points: Float[Tensor, "k b"], directions: Float[Tensor, "k b"]) -> Float[Tensor, "k b"]:
    """Find the direction whose zeros are among the rows that are inactive for p.

    p is not exact, so L q is not zero on some of these rows. The function must ignore these rows. It uses one of two
    methods:

    - If there are many inactive rows, it solves the smallest of them (``concentrated``). A solution that is zero on
      half of the inactive rows is solved again for all its zeros (``refit``).
    - If there are few inactive rows, or the zeros allow more than one direction, it solves all rows by iteratively
      reweighted least squares (``_reweighted``), and then again for the zeros.

    A direction for which no method succeeds stays nearly unchanged.
    """
    m, b = problem.factors.left.shape
    size = chunk_size(points.device, 8 * m * b)
    solved = sphere.retract(directions)
    inactive = inactive_neurons(problem, points)
    ambiguous = inactive.sum(1) < MIN_ROWS_PER_UNKNOWN * b
    for part in _chunks(~ambiguous, size):
        check_time()
        inactive_here = inactive[part]
        found, determined = concentrated(problem, inactive_here, solved[part])
        zeros = problem.tolerance.look_zero(found @ problem.factors.left.T, found) & inactive_here
        kept = (zeros.sum(1) >= MIN_PROMISING_SHARE * inactive_here.sum(1)).nonzero()[:, 0]
        part, determined, found = part[kept], determined[kept], refit(problem, found[kept])
        unclear = (~determined).nonzero()[:, 0]
        if len(unclear):
            determined[unclear] = _determined_by_zeros(problem, found[unclear])
        solved[part] = torch.where(determined[:, None], found, solved[part])
        ambiguous[part] = ~determined
    for part in _chunks(ambiguous, size):
        check_time()
        solved[part] = refit(problem, _reweighted(problem, points[part], solved[part]))
    return solved


def _chunks(which: Bool[Tensor, "k"], size: int) -> list[Int[Tensor, "part"]]:
    """Return the indices of the true entries, in non-empty chunks."""
    return [part for part in torch.nonzero(which)[:, 0].split(size) if len(part)]


def concentrated(
    problem: Problem, inactive: Bool[Tensor, "k m"], directions: Float[Tensor, "k b"]
) -> tuple[Float[Tensor, "k b"], Bool[Tensor, "k"]]:
    """Minimise Σ (ℓ_k·q)² over the smallest of the ``inactive`` rows, and then over more of them.

    These are the concentration steps of least trimmed squares (Rousseeuw and Van Driessen 2006).

    Returns:
        The directions, and which of them are determined. Similar samples share most of their zeros, so their zeros may
        allow more than one direction.
    """
    for share in TRIMMED_SHARES[:-1]:
        check_time()
        rows = _smallest(problem, inactive, directions, share)
        directions = smallest_eigenvector(rows.mT @ rows)
    rows = _smallest(problem, inactive, directions, TRIMMED_SHARES[-1])
    first_two = two_smallest_eigenvectors(rows.mT @ rows)
    second = torch.linalg.vector_norm((rows @ first_two[:, :, 1:])[:, :, 0], dim=1)
    return first_two[:, :, 0], second >= MIN_SECOND_SINGULAR_VALUE


def _determined_by_zeros(problem: Problem, directions: Float[Tensor, "k b"]) -> Bool[Tensor, "k"]:
    """Return whether the zeros of each direction allow no other direction."""
    left = problem.factors.left
    zeros = problem.zeros(directions) & problem.factors.live
    _, values = kernel_vectors(gather_weighted(left, zeros.to(left)))
    return values[:, 1] >= MIN_SECOND_SINGULAR_VALUE


def _smallest(problem: Problem, inactive: Tensor, directions: Tensor, share: float) -> Float[Tensor, "k r b"]:
    """Gather the given share of the inactive rows with the smallest |ℓ_k·q|. Shorter sets are padded with zeros."""
    left = problem.factors.left
    last = (share * inactive.sum(1)).long()
    values = torch.where(inactive, (directions @ left.T).abs(), torch.inf)
    places = values.topk(int(last.max()) + 1, dim=1, largest=False).indices
    kept = torch.arange(places.shape[1], device=last.device) <= last[:, None]
    return kept[:, :, None] * left[places]


def _reweighted(problem: Problem, points: Tensor, directions: Tensor) -> Tensor:
    """Minimise Σ |ℓ_k·q| over the rows that are inactive for p, by iteratively reweighted least squares.

    The weights are 1/max(|ℓ_k·q|, δ), where δ shrinks to the noise. Rows that p calls inactive by mistake therefore
    lose their influence.
    """
    left, tolerance = problem.factors.left, problem.tolerance
    inactive = inactive_neurons(problem, points)
    inactive, places = inactive.to(left).topk(max(1, int(inactive.sum(1).max())), dim=1)
    rows, noise = left[places], tolerance.row_noise[places]
    delta = (inactive * (rows @ directions[:, :, None])[:, :, 0].abs()).amax(1, keepdim=True).clamp_min(1e-290)
    for _ in range(_REWEIGHTINGS):
        check_time()
        values = (rows @ directions[:, :, None])[:, :, 0].abs()
        floor = torch.maximum(delta, noise * tolerance.amplification(directions)[:, None])
        weight = inactive / torch.maximum(values, floor)
        normal = rows.mT @ (weight[:, :, None] * rows)
        diagonal = normal.diagonal(dim1=1, dim2=2)
        diagonal.add_(1e-14 * diagonal.mean(1, keepdim=True))
        factor, failed = torch.linalg.cholesky_ex(normal)
        solved = sphere.retract(torch.cholesky_solve(points[:, :, None], factor)[:, :, 0])
        directions = torch.where((failed == 0)[:, None], solved, directions)
        delta = delta * _DELTA_FACTOR
    return directions
