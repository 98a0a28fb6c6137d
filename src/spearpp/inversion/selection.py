"""Select b candidate directions that belong together, fix their scale and score the selection.

The names initFilt, fixScale, computeScore and GreedyFilt are those of the SPEAR++ paper's appendix. Let the columns of
Q be b unit directions, with inverse P. Input i is x̂_i = Rᵀp_i / s_i, where s = P R[:, bias] makes the last coordinate
of x̂_i equal to 1. The pre-activations of input i are z_i = A p_i / s_i. Column i of D is zero where L q_i is zero. If
the selection is right, column i of D is zero exactly where z_i is not positive. The score λ measures this agreement.
Only the sign of z matters for the score, so only the sign of s does.
"""

from dataclasses import dataclass

import torch

from spearpp.inversion.pool import Pool
from spearpp.inversion.problem import Problem
from spearpp.inversion.tolerance import MIN_INDEPENDENT_DISTANCE
from spearpp.linalg.chunks import chunk_size, small_chunk_size
from spearpp.linalg.nullspace import complement, gather_weighted, independent, smallest_eigenvector
from spearpp.linalg.time_limit import check_time
from spearpp.types import Bool, Float, Int, Tensor

RETRIED_PER_SAMPLE = 4
"""Number of candidates, for each sample of the batch, that ``greedy_filt`` tries again after its first pass. Design
choice: candidates are sorted, and the samples of the batch are among the first candidates."""


@dataclass(frozen=True, eq=False)
class Selection:
    """b directions, selected as the columns of Q."""

    directions: Float[Tensor, "b b"]
    """Qᵀ, one unit direction in each row. Candidates come first, then a basis of their orthogonal complement."""
    zeros: Bool[Tensor, "b m"]
    """Which entries of each column of D are zero, one row for each direction."""
    found: int
    """How many of the directions are candidates. The others complete the basis."""
    score: float
    """λ, the share of entries of D that are zero exactly where the neuron is inactive."""
    points: Float[Tensor, "b b"]
    """P = Q⁻¹, one point p_i in each row."""

    @classmethod
    def of(
        cls, problem: Problem, directions: Float[Tensor, "b b"], zeros: Bool[Tensor, "b m"], found: int | None = None
    ) -> "Selection":
        """Compute the inverse and the score (computeScore). ``found=None`` means that all directions are candidates."""
        points = torch.linalg.inv(directions.T)
        score = int(_agreement(problem, *_unscaled(problem, points), zeros).sum()) / zeros.numel()
        return cls(directions, zeros, len(directions) if found is None else found, score, points)

    @property
    def full(self) -> bool:
        """Whether all b directions are candidates."""
        return self.found == self.directions.shape[0]


def init_filt(pool: Pool, order: Int[Tensor, "candidates"] | None = None) -> Int[Tensor, "chosen"]:
    """initFilt: return the indices of the first linearly independent candidates, at most b of them.

    ``order`` has the indices of the candidates in the order in which they are considered; None is the sparsest first.
    """
    order = pool.sparsest_first() if order is None else order
    return order[independent(pool.directions[order], MIN_INDEPENDENT_DISTANCE)]


def fix_scale(problem: Problem, inverse: Float[Tensor, "k b"], zeros: Bool[Tensor, "k m"]) -> Float[Tensor, "k"]:
    """fixScale: return s = Q⁻¹ L⁺ g, so that the columns of D = L Q diag(s) sum to the bias gradient g.

    Without a bias, the gradient does not determine the scale. Then s is the sign, 1 or -1, for which the activation
    pattern of the input agrees better with the zeros of its column.
    """
    if problem.seen.has_bias:
        return (inverse @ problem.factors.right[:, -1:])[:, 0]
    active = inverse @ problem.preactivations.T > 0
    agreeing_if_positive = (active != zeros).sum(1)
    return torch.where(2 * agreeing_if_positive >= zeros.shape[1], 1.0, -1.0).to(inverse)


def _unscaled(problem: Problem, points: Float[Tensor, "b b"]) -> tuple[Float[Tensor, "b m"], Float[Tensor, "b"]]:
    """Return P Aᵀ, the pre-activations before they are divided by s, and s = P R[:, bias].

    s is not used if the layer has no bias.
    """
    return points @ problem.preactivations.T, (points @ problem.factors.right[:, -1:])[:, 0]


def swap_scores(
    problem: Problem, chosen: Selection, candidates: Float[Tensor, "k b"], patterns: Bool[Tensor, "k m"]
) -> Int[Tensor, "k b"]:
    """Return ``merit`` with each candidate in each of the b places; -1 if it is in the span of the other directions.

    Let v be a candidate and u = P v. If v replaces direction j, row j of the inverse becomes p_j / u_j and every other
    row i becomes p_i - (u_i / u_j) p_j, so no matrix is inverted. ``patterns`` are the zeros of the candidates.
    """
    points, zeros = chosen.points, chosen.zeros
    b, m = zeros.shape
    u = candidates @ points.T
    z, s = _unscaled(problem, points)
    scores = torch.full(u.shape, -1, dtype=torch.long, device=u.device)
    distance = u.abs() / torch.linalg.vector_norm(points, dim=1)  # of the candidate from the other directions
    swaps = torch.nonzero(distance > problem.tolerance.angle(candidates)[:, None])
    for which, place in (chunk.unbind(1) for chunk in swaps.split(chunk_size(u.device, 8 * b * m))):
        check_time()
        ratio = u[which] / u[which, place, None]  # (swaps, b)
        replaced = torch.nn.functional.one_hot(place, b).bool()
        keep = torch.where(replaced, 0.0, 1.0)
        ratio = torch.where(replaced, -1 / u[which, place, None], ratio)
        # Row i becomes keep_i p_i - ratio_i p_j.
        unscaled = keep[:, :, None] * z - ratio[:, :, None] * z[place, None, :]
        scale = keep * s - ratio * s[place, None]
        swapped = torch.where(replaced[:, :, None], patterns[which, None, :], zeros)
        scores[which, place] = _agreement(problem, unscaled, scale, swapped).sum(1) + swapped.sum((1, 2))
    return scores


def _agreement(problem: Problem, unscaled: Tensor, scale: Tensor, zeros: Tensor) -> Int[Tensor, "*n b"]:
    """Count, for each input, the neurons that are inactive exactly where the column of D is zero.

    z has the sign of A p_i / s_i. Without a bias the better sign is used instead.
    """
    if problem.seen.has_bias:
        return ((unscaled * scale.sign()[..., None] > 0) != zeros).sum(-1)
    positive = ((unscaled > 0) != zeros).sum(-1)
    negative = ((unscaled < 0) != zeros).sum(-1)
    return torch.maximum(positive, negative)


def greedy_filt(
    problem: Problem, chosen: Selection, pool: Pool, pool_indices: Int[Tensor, "b"], order: Int[Tensor, "candidates"]
) -> Selection:
    """GreedyFilt: swap candidates, tried in this order, into the selection while a swap improves it and λ is below 1.

    A candidate replaces the direction for which the swap improves ``merit`` most. ``merit`` counts the agreeing entries
    of D, as λ does, and each zero of D once more. The second term is needed if local training or noise keeps λ below 1:
    a mixture of similar samples can then agree better than the samples themselves, but it has fewer zeros.

    ``swap_scores`` scores all b places for a candidate in one batch. The best place therefore costs no more than the
    first improving place, which the paper takes. After a pass that changed the selection, the first candidates are
    tried again, including those that were swapped out. A right direction may look no better than a wrong one as long as
    other directions in the selection are wrong. ``pool_indices`` has the index in the pool of each of the b directions;
    -1 for a direction that is not in the pool.
    """
    b, m = chosen.zeros.shape
    best, best_before = merit(chosen), -1
    selected, tried = pool_indices.tolist(), order.tolist()
    most_at_once = small_chunk_size(chosen.directions.device, 8 * b * b * m)
    while best_before < best and chosen.score < 1:
        if best_before >= 0:
            tried = tried[: RETRIED_PER_SAMPLE * b]
        best_before = best
        start, at_once = 0, 1
        while start < len(tried) and chosen.score < 1:
            check_time()
            candidates = [index for index in tried[start : start + at_once] if index not in selected]
            scores = swap_scores(problem, chosen, pool.directions[candidates], pool.zeros[candidates])
            improving = (scores.amax(1) > best).nonzero()[:, 0]
            if not len(improving):
                # Most candidates improve nothing. Score twice as many at once until one does.
                start, at_once = start + at_once, min(2 * at_once, most_at_once)
                continue
            first = int(improving[0])
            place, index = int(scores[first].argmax()), candidates[first]
            best, selected[place] = int(scores[first, place]), index
            directions, zeros = chosen.directions.clone(), chosen.zeros.clone()
            directions[place], zeros[place] = pool.directions[index], pool.zeros[index]
            chosen = Selection.of(problem, directions, zeros, chosen.found)
            start, at_once = tried.index(index, start) + 1, 1
    return chosen


def merit(chosen: Selection) -> int:
    """Return what GreedyFilt improves: the number of agreeing entries of D, m·b·λ, plus the number of zeros."""
    return round(chosen.score * chosen.zeros.numel()) + int(chosen.zeros.sum())


def least_noisy_first(problem: Problem, pool: Pool) -> Int[Tensor, "candidates"]:
    """Return the indices of all candidates by increasing ‖Σ⁻¹q‖, the noise of L q.

    Directions of samples with a strong gradient come first, then weak samples, then directions that only fit noise.
    """
    return problem.tolerance.amplification(pool.directions).argsort(stable=True)


def initial(
    problem: Problem, pool: Pool, order: Int[Tensor, "candidates"] | None = None
) -> tuple[Selection, Int[Tensor, "b"]]:
    """Return the selection of initFilt and the index in the pool of each of its directions.

    If initFilt finds fewer than b directions, a basis of their orthogonal complement completes them. The index of such
    a direction is -1.
    """
    first = init_filt(pool, order)
    found, completing = pool.directions[first], problem.batch_size - len(first)
    directions = torch.cat([found, complement(found).T]) if completing else found
    zeros = torch.cat([pool.zeros[first], pool.zeros.new_zeros(completing, pool.zeros.shape[1])])
    zeros[len(first) :, ~problem.factors.live] = True
    chosen = Selection.of(problem, directions, zeros, len(first))
    return chosen, torch.cat([first, first.new_full((completing,), -1)])


def select(
    problem: Problem,
    pool: Pool,
    before: Selection | None = None,
    *,
    order: Int[Tensor, "candidates"] | None = None,
) -> Selection:
    """Select b directions from the pool: initFilt, completed to a basis if necessary, then GreedyFilt.

    ``before`` is the selection from an earlier, smaller pool. Candidates that were added later may be wrong. GreedyFilt
    therefore also runs from this selection, and the better of both results is returned.
    """
    order = pool.sparsest_first() if order is None else order
    start, pool_indices = initial(problem, pool, order)
    fresh = greedy_filt(problem, start, pool, pool_indices, order)
    if before is None or fresh.score == 1.0:
        return fresh
    again = greedy_filt(
        problem, before, pool, torch.full_like(pool_indices, -1), order[: RETRIED_PER_SAMPLE * len(pool_indices)]
    )
    return again if merit(again) > merit(fresh) else fresh


def refit_to_patterns(problem: Problem, chosen: Selection) -> Selection:
    """Solve every direction again, using only zeros that the activation pattern of its input confirms.

    With noise, a small gradient can look like a zero and turn the direction. All b directions together give the inputs,
    and the inputs show which neurons are inactive. Only rows that are zero and inactive are used. Without noise, all
    zeros belong to inactive neurons and nothing changes. The selection is returned as it is if it is not full.
    """
    if not chosen.full or problem.batch_size == 1:
        return chosen
    live, rows = problem.factors.live, problem.rows_per_noise
    size = chunk_size(rows.device, 8 * rows.numel())
    for _ in range(2):  # New directions give new inputs, which may confirm other zeros.
        signed = chosen.points * fix_scale(problem, chosen.points, chosen.zeros).sign()[:, None]
        zeros = chosen.zeros & live
        confirmed = zeros & (signed @ problem.preactivations.T <= 0)
        usable = (confirmed != zeros).any(1) & (confirmed.sum(1) >= problem.batch_size)
        if not bool(usable.any()):
            return chosen
        directions = chosen.directions.clone()
        chunks = (gather_weighted(rows, chunk.to(rows)) for chunk in confirmed[usable].split(size))
        directions[usable] = torch.cat([smallest_eigenvector(chunk.mT @ chunk) for chunk in chunks])
        if int(torch.linalg.matrix_rank(directions.cpu(), rtol=MIN_INDEPENDENT_DISTANCE)) < len(directions):
            return chosen
        zeros = problem.zeros(directions)
        chosen = Selection.of(problem, directions, zeros)
    return chosen


def inputs_at(problem: Problem, points: Float[Tensor, "k b"], zeros: Bool[Tensor, "k m"]) -> Float[Tensor, "k n"]:
    """Return the input x of each point p, from x̂ = Rᵀp / s.

    Without a bias, the scale of the inputs is unknown and they have unit norm, with the sign that the zeros of the
    column of D determine. The scale is also unknown for a sample whose bias gradient is zero. Its input keeps the scale
    of p.
    """
    scale = fix_scale(problem, points, zeros)
    inputs = points @ problem.factors.right
    if problem.seen.has_bias:
        return inputs[:, :-1] / torch.where(scale == 0, 1.0, scale)[:, None]
    return inputs * scale[:, None] / torch.linalg.vector_norm(inputs, dim=1, keepdim=True)
